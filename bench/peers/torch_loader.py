"""torch.utils.data.DataLoader with worker processes: the loader all others are compared to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from bench.peers import LoaderSettings, Peer
from bench.workloads import Load


def loader_arguments(load: Load, settings: LoaderSettings) -> dict[str, Any]:
    """The arguments of torch's constructor, which a drop-in replacement takes unchanged."""
    return {
        "dataset": load.dataset,
        "batch_size": load.batch_size,
        "shuffle": load.shuffle,
        "num_workers": settings.num_workers,
        "prefetch_factor": settings.prefetch_factor,
        "persistent_workers": True,
        "multiprocessing_context": settings.start_method,
    }


class TorchLoader(Peer):
    distributions = ("torch", "numpy")

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        self.prefetched = settings.num_workers * settings.prefetch_factor
        self._loader: DataLoader[Any] | None = DataLoader(**loader_arguments(load, settings))

    def epoch(self) -> Iterator[Any]:
        assert self._loader is not None, "epoch() after close()"
        return iter(self._loader)

    def close(self) -> None:
        # torch has no public call for this: persistent workers stop when the last reference is gone.
        self._loader = None


PEER = TorchLoader
