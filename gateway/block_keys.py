"""Keys of KV blocks: equal prompt beginnings have equal keys, whoever computed them, within this process.

vLLM's own block hashes depend on its release, its algorithm and its seed. A key here is made of the token ids alone:
``key(block) = hash((key(block before), ids of the block))``, so what a backend reports as cached and what a request's
prompt consists of can be compared whatever the backend hashes with. Python's hash of bytes is SipHash with a random key
of this process: nobody outside can make two blocks collide. Keys mean nothing to another process.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

ID_BYTES = 4
# Of prompts and of events: what does not fit into 32 bits is no token id.
_TYPE = "I" if array("I").itemsize == ID_BYTES else "L"

Keys = Sequence[int]


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The full KV blocks of a prompt of ``tokens`` tokens: their keys in order, by the tokens in a block."""

    tokens: int
    keys: Mapping[int, Keys] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockWish:
    """Which keys are wanted of a prompt: for blocks of these sizes in tokens, behind ``root``."""

    sizes: tuple[int, ...]
    root: int


def root_key(adapter: str = "", salt: str = "") -> int:
    """What stands before the first block: prompts to different LoRA adapters, or with different cache salts, share no
    blocks. The model needs no part in it: prompts are only looked up at backends that serve it."""
    return hash((b"kvgate", adapter.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")))


def next_key(before: int, ids: bytes, extra: str = "") -> int:
    """The key of a block of token ids (``id_bytes``). ``extra``: whatever else sets it apart, such as an image."""
    return hash((before, ids, extra)) if extra else hash((before, ids))


def id_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as they are hashed. Raises ``TypeError`` or ``OverflowError`` for what is none."""
    return array(_TYPE, ids).tobytes()


def same_bytes(one: bytes, other: bytes) -> int:
    """How many first bytes two texts have in common."""
    low, high = 0, min(len(one), len(other)) + 1
    if one[: high - 1] == other[: high - 1]:
        return high - 1
    while high - low > 1:  # the first ``low`` are equal, the first ``high`` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def from_little_endian(ids: bytes) -> bytes:
    """The same of ids that came as little-endian 32-bit integers."""
    if sys.byteorder == "little":
        return ids
    swapped = array(_TYPE, ids)
    swapped.byteswap()
    return swapped.tobytes()


def block_keys(ids: bytes, size_tokens: int, root: int, known: Keys = ()) -> array[int]:
    """The keys of all full blocks of ``ids``; ``known`` are those of the first of them."""
    keys = array("q", known)
    step = size_tokens * ID_BYTES
    key = keys[-1] if keys else root
    append = keys.append
    for start in range(len(keys) * step, len(ids) - step + 1, step):
        key = hash((key, ids[start : start + step]))
        append(key)
    return keys
