"""The reorder ring: answers come in any order, batches leave in the order of their sequence numbers.

Pure: no process, clock or socket. The scheduler owns the only instance of an epoch.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")

_EMPTY: Any = object()


class ReorderRing(Generic[T]):
    """A bounded ring of slots, one for each sequence number from `head` to `head + capacity - 1`.

    Args:
        capacity: slots, in batches; at least 1.

    Attributes:
        head: the lowest sequence number that has not left the ring.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        self.head = 0
        self._slots: list[T] = [_EMPTY] * capacity
        self._filled = 0

    def __len__(self) -> int:
        """Items in the ring."""
        return self._filled

    def push(self, seq: int, item: T) -> None:
        """Store `item` under `seq`.

        Raises:
            ValueError: `seq` has left the ring, lies beyond it, or is taken. Each would break
                exactly-once delivery.
        """
        if not self.head <= seq < self.head + self.capacity:
            raise ValueError(f"seq={seq} lies outside the ring [{self.head}, {self.head + self.capacity})")
        slot = seq % self.capacity
        if self._slots[slot] is not _EMPTY:
            raise ValueError(f"seq={seq} is in the ring already")
        self._slots[slot] = item
        self._filled += 1

    def ready(self) -> bool:
        """Whether the head's item is here."""
        return self._slots[self.head % self.capacity] is not _EMPTY

    def pop_ready(self) -> T:
        """Take the head's item out and move on to the next sequence number.

        Raises:
            LookupError: the head's item is not here.
        """
        slot = self.head % self.capacity
        item = self._slots[slot]
        if item is _EMPTY:
            raise LookupError(f"seq={self.head} is not in the ring")
        self._slots[slot] = _EMPTY
        self._filled -= 1
        self.head += 1
        return item

    def items(self) -> list[T]:
        """What is in the ring, in no particular order."""
        return [item for item in self._slots if item is not _EMPTY]

    def drain(self) -> list[T]:
        """Empty the ring without moving its head; returns what was in it."""
        items = self.items()
        self._slots = [_EMPTY] * self.capacity
        self._filled = 0
        return items

    def skip(self) -> None:
        """Move past a head that will never come.

        Raises:
            ValueError: the head's item is here and would be lost.
        """
        if self.ready():
            raise ValueError(f"seq={self.head} is in the ring and would be lost")
        self.head += 1
