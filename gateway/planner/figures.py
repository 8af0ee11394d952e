"""A number that says how far it may be trusted: exact, measured or estimated, with its range."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GIB = 1 << 30
MIB = 1 << 20


class Kind(StrEnum):
    """Where a number comes from. A sum is only as good as its weakest part."""

    EXACT = "exact"
    MEASURED = "measured"
    ESTIMATED = "estimated"


_ORDER = (Kind.EXACT, Kind.MEASURED, Kind.ESTIMATED)


def weakest(*kinds: Kind) -> Kind:
    """The kind a result has when it rests on all of ``kinds``."""
    return max(kinds, key=_ORDER.index, default=Kind.EXACT)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its kind and the range it is expected in; ``low == high`` for an exact one."""

    value: float
    kind: Kind = Kind.EXACT
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def lowest(self) -> float:
        return self.value if self.low is None else self.low

    @property
    def highest(self) -> float:
        return self.value if self.high is None else self.high

    def as_json(self, digits: int = 3) -> dict[str, object]:
        """The stable JSON shape: ``value``, ``kind``, ``low``, ``high`` and a ``note`` where there is one."""

        def rounded(number: float) -> float | int:
            return int(number) if float(number).is_integer() and abs(number) >= 1000 else round(number, digits)

        shape: dict[str, object] = {
            "value": rounded(self.value),
            "kind": str(self.kind),
            "low": rounded(self.lowest),
            "high": rounded(self.highest),
        }
        if self.note:
            shape["note"] = self.note
        return shape


def ceil_div(numerator: int, denominator: int) -> int:
    """Integer division rounded up."""
    return -(-numerator // denominator)


def gib_text(gib: float) -> str:
    """A GiB number for people: two decimals, one from 100 on."""
    return f"{gib:.1f} GiB" if abs(gib) >= 100 else f"{gib:.2f} GiB"


def tokens_text(tokens: float) -> str:
    """A token count with thousands separators."""
    return f"{int(tokens):,}"
