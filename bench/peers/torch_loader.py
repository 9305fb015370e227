"""torch.utils.data.DataLoader: with worker processes the loader all others are compared to, and without.

Without workers it is the plain loop that a loader for small batches has to beat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from bench.peers import LoaderSettings, Peer, Unsupported
from bench.workloads import Load


def inline_arguments(load: Load) -> dict[str, Any]:
    """The arguments of torch's constructor without workers, which a drop-in replacement takes unchanged."""
    return {
        "dataset": load.dataset,
        "batch_size": load.batch_size,
        "sampler": load.sampler(),
        "collate_fn": load.collate_fn,
        "drop_last": True,
    }


def loader_arguments(load: Load, settings: LoaderSettings) -> dict[str, Any]:
    """The same with workers, if the settings ask for any."""
    arguments = inline_arguments(load)
    if settings.num_workers == 0:
        return arguments
    return arguments | {
        "num_workers": settings.num_workers,
        "prefetch_factor": settings.prefetch_factor,
        "persistent_workers": settings.persistent,
        "multiprocessing_context": settings.start_method,
    }


def refuse_no_workers(settings: LoaderSettings) -> None:
    """For a peer that is another one's counterpart without workers."""
    if settings.num_workers == 0:
        raise Unsupported("the run's own number of workers is 0 already")


class TorchLoader(Peer):
    distributions: ClassVar[tuple[str, ...]] = ("torch", "numpy")

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        self.prefetched = settings.num_workers * settings.prefetch_factor
        self.shards = settings.num_workers
        self._loader: DataLoader[Any] | None = self._make(load, settings)

    def _make(self, load: Load, settings: LoaderSettings) -> DataLoader[Any]:
        return DataLoader(**loader_arguments(load, settings))

    def epoch(self) -> Iterator[Any]:
        assert self._loader is not None, "epoch() after close()"
        return iter(self._loader)

    def close(self) -> None:
        # torch has no public call for this: persistent workers stop when the last reference is gone.
        self._loader = None


class TorchInline(Peer):
    distributions = ("torch", "numpy")

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        refuse_no_workers(settings)
        self._loader: DataLoader[Any] = DataLoader(**inline_arguments(load))

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        """Nothing runs that would have to be stopped."""
