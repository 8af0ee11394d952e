"""What the planner cannot do, said in one sentence that names what is missing."""

from __future__ import annotations


class PlannerError(Exception):
    """Base: the message is for the person at the terminal."""


class ModelNotFound(PlannerError):
    """MODEL is no file, no folder, no catalogue name and could not be fetched."""


class GeometryMissing(PlannerError):
    """The config lacks fields the KV arithmetic needs. ``fields`` names them."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class UnknownCard(PlannerError):
    """No card of that name in the table, and none given in GiB."""


class ContradictoryFlags(PlannerError):
    """Two flags exclude each other, or one is impossible on this model, card or version."""
