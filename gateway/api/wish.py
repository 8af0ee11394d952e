"""What a request says of its priority, and of which others it belongs to: headers, and fields of its body.

Priority classes are ``high``, ``normal`` and ``low``. ``x-kvgate-priority`` names one; else vLLM's own number does, in
``X-Vllm-Priority`` or the field ``priority``: below 0 is high, above 0 low. As with vLLM, the header goes before the
field, and one that is no number counts as none; a field that is none vLLM refuses itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from gateway.config import PRIORITIES, PlacingSettings, Priority
from gateway.exceptions import BadRequest
from gateway.types import Ask, Count, Dialect, Wish

HEADER = "x-kvgate-priority"
# Which requests belong together, the surest sign first.
SESSION_HEADERS = (b"x-session-affinity", b"x-session-id")
SESSION_FIELD = "prompt_cache_key"
# The engine of a server with several that is to do the work; what is no number means nothing to vLLM, either.
RANK_HEADER = b"x-data-parallel-rank"
# vLLM 0.32 reads it here only: a Responses or a pooling request goes to an engine of the server's choice.
RANK_HEEDED = frozenset({Dialect.CHAT, Dialect.COMPLETIONS, Dialect.MESSAGES})


def wish_of(
    ask: Ask,
    headers: Iterable[tuple[bytes, bytes]],
    key: str,
    count: Count,
    adapter: bool,
    settings: PlacingSettings,
    best: Priority | None = None,
) -> Wish:
    """How ``ask`` is to be queued and placed. ``key`` is the API key it came with, ``best`` the best class that key may
    name, if not the settings say so. Raises ``BadRequest`` if ``x-kvgate-priority`` names no class."""
    said = {name: value for name, value in headers if name in _LOOKED_AT}
    session = _session(ask, said)
    share = {"key": key, "session": session or key, "none": ""}[settings.share_by]
    return Wish(
        rank=_rank(ask, said, settings, best),
        flow=_digest(share),
        session=_digest(session),
        chain=count.chain if ask.counted else (),
        blocks=count.blocks if ask.counted else None,
        adapter=adapter,
        whole_budget=ask.document.get("ignore_eos") is True,
        streamed=ask.stream and ask.counted,
        engine=_number(said.get(RANK_HEADER)),
        heeded=ask.dialect in RANK_HEEDED,
    )


_LOOKED_AT = {HEADER.encode(), b"x-vllm-priority", RANK_HEADER, *SESSION_HEADERS}


def _rank(ask: Ask, said: dict[bytes, bytes], settings: PlacingSettings, best: Priority | None) -> int:
    rank = PRIORITIES.index(settings.default_priority)
    given = said.get(HEADER.encode(), b"").decode("latin-1").strip()
    if given:
        named = [index for index, known in enumerate(PRIORITIES) if known == given.lower()]
        if not named:
            known = ", ".join(PRIORITIES)
            raise BadRequest(f"`{HEADER}: {given[:40]}` names no priority class; there are: {known}.")
        rank = named[0]
    else:
        number = _number(said.get(b"x-vllm-priority"))
        number = _whole(ask.document.get("priority")) if number is None else number
        if number:
            rank = 0 if number < 0 else 2
    return max(rank, PRIORITIES.index(best or settings.highest_priority))


def _session(ask: Ask, said: dict[bytes, bytes]) -> str:
    for name in SESSION_HEADERS:
        value = said.get(name, b"").strip()
        if value:
            return value.decode("latin-1")
    field = ask.document.get(SESSION_FIELD)
    return field if isinstance(field, str) else ""


def _number(value: bytes | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None


def _whole(value: object) -> int | None:
    """A field as vLLM reads it: pydantic takes ``"7"`` and ``7.0`` for 7."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        return _number(value.encode("utf-8", "surrogatepass"))
    return value if isinstance(value, int) else None


def _digest(text: str) -> str:
    """A short name for something long or secret; empty for nothing."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if text else ""
