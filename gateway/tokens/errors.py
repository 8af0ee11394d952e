"""Why a source of counts had to pass. Never leaves this room: the next source is asked instead."""

from __future__ import annotations


class CannotCount(Exception):
    """This source cannot count this request.

    ``refused``: vLLM refuses the request as well, whatever its template, so no backend need be asked for a count.
    ``media``: it holds images, audio or video, whose tokens only the model's own processor knows.
    """

    def __init__(self, reason: str, *, refused: bool = False, media: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refused = refused
        self.media = media


class CannotLoad(Exception):
    """No local tokenizer can be had for a model. The message says why, in one line."""
