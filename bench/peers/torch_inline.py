"""torch's DataLoader without workers: the plain loop that a loader for small batches has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from bench.peers import LoaderSettings, Peer
from bench.workloads import Load


class TorchInline(Peer):
    distributions = ("torch", "numpy")
    prefetched = 0

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        self._loader: DataLoader[Any] = DataLoader(
            load.dataset, batch_size=load.batch_size, shuffle=load.shuffle, num_workers=0
        )

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        """Nothing runs that would have to be stopped."""


PEER = TorchInline
