"""What the parsers of the richer dialects share."""

from __future__ import annotations


class NotConvertible(Exception):
    """vLLM refuses this, or renders it in a way not known here: the request is estimated and forwarded."""
