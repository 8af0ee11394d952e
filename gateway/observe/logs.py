"""Logging: one line a fact on standard error. No request's content and no key is ever logged."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure(level: str) -> None:
    """Send records of ``level`` and above to standard error."""
    logging.basicConfig(level=level.upper(), format=FORMAT, force=True)
    for chatty in ("httpx2", "httpcore2", "asyncio", "transformers", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
