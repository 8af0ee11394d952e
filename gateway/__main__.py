"""``python -m gateway`` is the ``kvgate`` command."""

from gateway.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
