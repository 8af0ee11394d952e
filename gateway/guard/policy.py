"""What becomes of a request that overflows: whose word counts, and what it means. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.exceptions import BadRequest

HEADER = "x-kvgate-overflow"


class Policy(StrEnum):
    """What to do with an overflow.

    ``AUTO``: refuse a conversation's first, so that an agent can compact it by its own, better means; trim from then
    on, because some agents compact but once (Cline 4.x). ``LARGER``: send it to a model with a larger window, if one
    is named and holds it, else as ``AUTO``. ``PASS``: let the backend judge.
    """

    AUTO = "auto"
    REJECT = "reject"
    TRIM = "trim"
    LARGER = "larger"
    PASS = "pass"


class Action(StrEnum):
    """What is done with one overflow."""

    REFUSE = "refuse"
    TRIM = "trim"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy and who chose it: ``header``, ``body``, ``key``, ``route``, ``model`` or ``default``."""

    policy: Policy
    source: str


def choice(
    *,
    header: str | None,
    document: Mapping[str, Any],
    key: str | None,
    route: str | None,
    model: str | None,
    default: str,
) -> Choice:
    """The policy of a request. The closest word counts: of its header, body, key, path, model; then the default.

    Raises ``BadRequest`` if the header names no policy.
    """
    if header is not None and header.strip():
        try:
            return Choice(Policy(header.strip().lower()), "header")
        except ValueError:
            known = ", ".join(Policy)
            raise BadRequest(f"`{HEADER}: {header[:40]}` names no policy; there are: {known}.") from None
    said = consent(document)
    if said is not None:
        return Choice(said, "body")
    for source, name in (("key", key), ("route", route), ("model", model)):
        if name is not None:
            return Choice(Policy(name), source)
    return Choice(Policy(default), "default")


def consent(document: Mapping[str, Any]) -> Policy | None:
    """What the body itself says. ``truncation`` is a field of Responses; Cline 4.x sends it with chats, too."""
    match document.get("truncation"):
        case "auto":
            return Policy.TRIM
        case "disabled":
            return Policy.REJECT
    return None


def action(policy: Policy, *, refused_before: bool, user_agent: str, trim_clients: tuple[str, ...]) -> Action:
    """What to do with an overflow. ``refused_before``: one of this conversation was. ``trim_clients`` are words in the
    ``User-Agent`` of clients that would only show an error, so that refusing them even once does no good.
    """
    match policy:
        case Policy.REJECT:
            return Action.REFUSE
        case Policy.TRIM:
            return Action.TRIM
        case Policy.PASS:
            return Action.PASS
    hopeless = any(word.lower() in user_agent.lower() for word in trim_clients if word)
    return Action.TRIM if refused_before or hopeless else Action.REFUSE


def larger_model(model: str, larger: str | None, windows: Mapping[str, int]) -> str | None:
    """The model that takes what ``model`` cannot, or ``None``. ``windows``: largest window by model, of those served.

    Never one with a smaller window, or the same: it would refuse what this one refuses.
    """
    if larger is None or windows.get(larger, 0) <= windows.get(model, 0):
        return None
    return larger
