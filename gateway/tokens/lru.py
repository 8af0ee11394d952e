"""A small cache bounded by the sum of what its entries weigh; the least recently used go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Lru(Generic[Key, Value]):
    """Keeps values until together they weigh more than ``limit``. Safe to call from several threads.

    The unit of weight is the caller's: bytes, or entries (the default weight is 1).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.weight = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """The value of ``key``, which counts as used now."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: Key, value: Value, weight: int = 1) -> None:
        """Keep ``value``; one that alone weighs more than the limit is not kept."""
        with self._lock:
            former = self._entries.pop(key, None)
            if former is not None:
                self.weight -= former[1]
            if weight > self.limit:
                return
            self._entries[key] = (value, weight)
            self.weight += weight
            while self.weight > self.limit:
                _, (_, gone) = self._entries.popitem(last=False)
                self.weight -= gone
