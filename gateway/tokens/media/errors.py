"""Why an item of media has no token count here. The request is then counted by another source."""

from __future__ import annotations


class UnknownMedia(Exception):
    """The item's size, or what the model makes of it, cannot be told here. The message says why, in one line.

    ``refused``: vLLM refuses the item as well (broken base64, zero pixels, an aspect ratio beyond the model's).
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refused = refused
