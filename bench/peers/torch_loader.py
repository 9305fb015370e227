"""torch.utils.data.DataLoader: with worker processes the loader all others are compared to, and without.

Without workers it is the plain loop that a loader for small batches has to beat. Drop-in replacements are
subclasses that make another loader of the very same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from bench.peers import LoaderSettings, Peer, Unsupported
from bench.workloads import Load


def loader_arguments(load: Load, settings: LoaderSettings) -> dict[str, Any]:
    """The arguments of torch's constructor, which a drop-in replacement takes unchanged."""
    several = ("dataset", "batch_size", "collate_fn")
    arguments = {name: getattr(load, name) for name in several} | {
        "sampler": load.sampler(),
        "drop_last": True,
    }
    if settings.num_workers:
        arguments |= {"num_workers": settings.num_workers, "multiprocessing_context": settings.start_method}
        arguments |= {"prefetch_factor": settings.prefetch_factor, "persistent_workers": settings.persistent}
    return arguments


class TorchLoader(Peer):
    """`loader`: what is measured, until it is closed."""

    loader_class: ClassVar[Any] = DataLoader

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        self.prefetched = settings.num_workers * settings.prefetch_factor
        self.shards = settings.num_workers
        self.loader: Any = self.loader_class(**loader_arguments(load, settings))

    def epoch(self) -> Iterator[Any]:
        return iter(self.loader)

    def close(self) -> None:
        # torch has no public call for this: persistent workers stop when the last reference is gone.
        self.loader = None


class TorchInline(TorchLoader):
    """The same without workers; also for the loader of another class, if that comes after this one."""

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        if settings.num_workers == 0:
            raise Unsupported("the run's own number of workers is 0 already")
        super().__init__(load, settings._replace(num_workers=0))
