"""torch's datapipe graphs (`IterDataPipe`, `MapDataPipe`): shared seeds and sharding.

Runs in the consumer and in workers. Only for loaders whose dataset is such a graph, and only through
torch's own `graph_settings`; any other dataset is passed through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings

from fastq_loader.system.torch_names import sharding_worker_init_fn

InitFn = Callable[[int], Any]
#: The classes of graphs.
GRAPHS = IterDataPipe, MapDataPipe


def draw_shared_seed(dataset: Any, generator: torch.Generator | None) -> int | None:
    """Draw the seed that all shuffling pipes of a graph share in one epoch; None for other datasets.

    One `random_()` of an int64 tensor from `generator`, as torch draws it; in a process group, rank 0's.
    """
    if not isinstance(dataset, IterDataPipe):
        return None
    seed = torch.empty((), dtype=torch.int64).random_(generator=generator)
    if world_size_and_rank()[0] > 1:
        dist.broadcast(seed, src=0)
    return int(seed.item())


def apply_seed(dataset: Any, shared_seed: int | None) -> Any:
    """The dataset, with shuffling pipes seeded if there is a seed."""
    if shared_seed is None:
        return dataset
    generator = torch.Generator()
    generator.manual_seed(shared_seed)
    return graph_settings.apply_random_seed(dataset, generator)


def world_size_and_rank() -> tuple[int, int]:
    """World size and rank; (1, 0) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def shard(dataset: Any, instances: int, instance: int) -> None:
    """Make a graph yield the share of one of `instances` readers; other datasets are left alone."""
    if isinstance(dataset, GRAPHS):
        graph_settings.apply_sharding(dataset, instances, instance)


def sharding_init_fn(dataset: Any, init_fn: InitFn | None) -> InitFn | None:
    """The `worker_init_fn` that shards a graph over ranks and workers before the user's own."""
    if not isinstance(dataset, GRAPHS):
        return init_fn
    return functools.partial(sharding_worker_init_fn, init_fn, *world_size_and_rank())
