"""``kvgate config``: check the settings and print what they come to."""

from __future__ import annotations

import argparse
import json
import sys

from gateway.cli import settings as flags


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    flags.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the effective settings, keys hidden. 2 if they are wrong."""
    import yaml

    from gateway.configuring import ConfigError

    try:
        tree = flags.read(options).model_dump(mode="json")
    except ConfigError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(tree, indent=2) if options.json else yaml.safe_dump(tree, sort_keys=False).rstrip())
    return 0
