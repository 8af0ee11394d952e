"""The payload of a KV event message to the events in it, whichever vLLM wrote it.

A payload is msgpack: ``[seconds, [event…], rank?]``. An event is an array that begins with its class's name up to vLLM
0.22 or so, and a map with that name as ``type`` from 0.24 on; fields were only ever added, at the end. What cannot be
understood is left out and counted, never an error: only a payload that is no batch at all raises ``Garbled``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.block_keys import ID_BYTES, id_bytes
from gateway.routing.feeds import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored

# vLLM 0.32's order (``distributed/kv_events.py``); older ones end earlier.
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_FIELDS: Mapping[Any, tuple[str, ...]] = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}
_HERE = frozenset({None, "GPU", "gpu"})
# Kinds of KV cache groups in which a block stands for all tokens before it. Those of others come and go by themselves.
_WHOLE = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# A longer run of blocks is handed on in parts, so that whoever takes them in can let others go between them.
PART_BLOCKS = 256
# Longer ones do not come from a step of any engine.
MOST_PAYLOAD_BYTES = 8 << 20


class Garbled(ValueError):
    """A message that is no batch of KV events."""


class _Odd(ValueError):
    """An event that cannot be understood."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's events. ``sent_s`` is the publisher's wall clock. ``ignored`` are about other tiers (CPU, disk) or
    kinds of caches, ``odd`` are none that vLLM is known to send."""

    sent_s: float
    events: tuple[BlockEvent, ...]
    ignored: int = 0
    odd: int = 0


def decoder() -> Callable[[bytes], Batch]:
    """What reads payloads. Raises ``ImportError`` without msgspec."""
    import msgspec

    decode = msgspec.msgpack.Decoder().decode

    def read(payload: bytes) -> Batch:
        """Raises ``Garbled``."""
        if len(payload) > MOST_PAYLOAD_BYTES:
            raise Garbled(f"a message of {len(payload)} bytes")
        try:
            document = decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Garbled(f"no msgpack: {error}") from None
        return batch_of(document)

    return read


def batch_of(document: Any) -> Batch:
    """The batch in a decoded payload. Raises ``Garbled``."""
    if not isinstance(document, list) or len(document) < 2:
        raise Garbled("not an array of time and events")
    sent_s, raw = document[0], document[1]
    if isinstance(sent_s, bool) or not isinstance(sent_s, int | float) or not isinstance(raw, list):
        raise Garbled("not an array of time and events")
    events: list[BlockEvent] = []
    ignored = odd = 0
    for each in raw:
        try:
            found = _events(each)
            if found:
                events += found
            else:
                ignored += 1
        except (_Odd, TypeError, ValueError, OverflowError, AttributeError, LookupError):
            odd += 1
    return Batch(float(sent_s), tuple(events), ignored, odd)


def _events(raw: Any) -> Sequence[BlockEvent]:
    """What an event comes down to: nothing if it is about another cache."""
    if type(raw) is dict:
        name, fields = raw.get("type"), raw
    else:
        name = raw[0] if isinstance(raw, list) and raw else None
        names = _FIELDS.get(name) if isinstance(name, str) else None
        if names is None:
            raise _Odd
        fields = dict(zip(names, raw[1:], strict=False))
    if name == "AllBlocksCleared":
        return (BlocksCleared(),)
    if name not in ("BlockStored", "BlockRemoved"):
        raise _Odd
    medium = fields.get("medium")
    if medium not in _HERE or fields.get("locality") == "REMOTE":
        return ()
    group = fields.get("group_idx")
    hashes = [_hash(value) for value in fields["block_hashes"] or ()]
    if not hashes or not (group is None or isinstance(group, int)):
        raise _Odd
    if name == "BlockRemoved":
        return (BlocksRemoved(hashes, group),)
    return _stored(fields, hashes, group) if fields.get("kv_cache_spec_kind") in _WHOLE else ()


def _stored(fields: Mapping[str, Any], hashes: list[int], group: int | None) -> Sequence[BlocksStored]:
    size = fields["block_size"]
    if not isinstance(size, int) or size < 1:
        raise _Odd
    ids = id_bytes(fields["token_ids"])
    before = fields.get("parent_block_hash")
    parent = None if before is None else _hash(before)
    name, number = fields.get("lora_name"), fields.get("lora_id")
    adapter = name if isinstance(name, str) else "" if number is None else f"#{number}"  # before 0.14: a number
    salt, extras = _extras(fields.get("extra_keys"), name, len(hashes), parent is None)
    if len(hashes) <= PART_BLOCKS:
        return (BlocksStored(hashes, parent, ids, size, adapter, salt, extras, group),)
    step, parts = size * ID_BYTES, []
    for start in range(0, len(hashes), PART_BLOCKS):
        end = start + PART_BLOCKS
        here = ids[start * step : end * step]
        parts.append(BlocksStored(hashes[start:end], parent, here, size, adapter, salt, extras[start:end], group))
        parent = hashes[min(end, len(hashes)) - 1]
    return parts


def _extras(raw: Any, adapter: Any, length: int, begins: bool) -> tuple[str, tuple[str, ...]]:
    """The cache salt, and what else sets each block apart, if anything does.

    Of each block: the adapter's name, ``(image, offset)`` pairs, in the first the salt, and digests of embeddings.
    """
    if not raw or not any(raw):
        return "", ()
    if len(raw) != length:
        raise _Odd
    salt, extras = "", []
    for place, each in enumerate(raw):
        rest = list(each or ())
        if rest and adapter is not None and rest[0] == adapter:
            del rest[0]
        if begins and not place and len(rest) == 1 and isinstance(rest[0], str):
            salt = rest.pop()
        extras.append(repr(rest) if rest else "")
    return salt, tuple(extras) if any(extras) else ()


def _hash(value: Any) -> int:
    """A block hash of vLLM's as a number of 64 bits: bytes, or a number (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)."""
    if type(value) is bytes and value:
        return int.from_bytes(value[-8:], "big")
    if isinstance(value, int) and not isinstance(value, bool):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    raise _Odd
