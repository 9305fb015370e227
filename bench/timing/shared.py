"""What several lanes of a case need, and nobody else: a cluster, links that are limited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from bench.peers import Unsupported
from bench.timing.rounds import reason

T = TypeVar("T")


class Shared(Generic[T]):
    """Made for the first lane that uses it, and ended after the last one.

    Args:
        make: makes it. What failed once is not tried again.

    Attributes:
        value: what was made.
    """

    value: T

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._users = 0
        self._failure = ""
        self._made: AbstractContextManager[T]

    @contextmanager
    def used(self) -> Iterator[T]:
        """
        Raises:
            Unsupported: it cannot be made.
        """
        if not self._users:
            self._begin()
        self._users += 1
        try:
            yield self.value
        finally:
            self._users -= 1
            if not self._users:
                del self.value
                self._made.__exit__(None, None, None)

    def _begin(self) -> None:
        if self._failure:
            raise Unsupported(self._failure)
        try:
            self._made = self._make()
            self.value = self._made.__enter__()
        except Exception as error:
            self._failure = reason(error)
            raise
