"""A workload's own loop as a peer: batches made without any loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.peers import Peer
from bench.workloads import Loop


class ByHand(Peer):
    distributions = ()

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def epoch(self) -> Iterator[Any]:
        return self._loop()

    def close(self) -> None:
        """Nothing runs that would have to be stopped."""
