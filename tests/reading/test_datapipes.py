"""torch's datapipe graphs: shared seeds and shards, and other datasets left alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.iter import IterableWrapper

from fastq_loader.reading import datapipes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of datapipes on their way out


def graph() -> Any:
    return IterableWrapper(range(8), deepcopy=False).shuffle().sharding_filter()


def test_every_shuffling_pipe_gets_the_seed() -> None:
    one, other = (list(datapipes.apply_seed(graph(), 5)) for _ in range(2))
    assert sorted(one) == list(range(8))
    assert one == other
    assert one != list(datapipes.apply_seed(graph(), 6))


def test_one_seed_is_drawn_from_the_generator_for_a_graph_and_none_for_others() -> None:
    generator = torch.Generator().manual_seed(3)
    assert datapipes.draw_shared_seed(range(8), generator) is None
    expected = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3))
    assert datapipes.draw_shared_seed(graph(), generator) == expected.item()
    data = range(8)
    assert datapipes.apply_seed(data, None) is data


def test_a_graph_is_cut_over_ranks_and_workers_before_the_users_own_init_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[list[int]] = []
    for rank, worker in itertools.product(range(2), range(2)):
        pipe = IterableWrapper(range(8), deepcopy=False).sharding_filter()
        monkeypatch.setattr(datapipes, "world_size_and_rank", lambda rank=rank: (2, rank))
        init: Any = datapipes.sharding_init_fn(pipe, lambda worker, pipe=pipe: parts.append([worker, *pipe]))
        info = torch_worker.WorkerInfo(id=worker, num_workers=2, seed=0, dataset=pipe)
        monkeypatch.setattr(torch_worker, "_worker_info", info)
        init(worker)
    # Over ranks first, then over workers: reader worker * 2 + rank of 4.
    assert parts == [[0, 0, 4], [1, 2, 6], [0, 1, 5], [1, 3, 7]]


def test_other_datasets_are_left_alone() -> None:
    assert datapipes.sharding_init_fn(range(8), None) is None
    assert datapipes.sharding_init_fn(range(8), print) is print
    datapipes.shard(range(8), 4, 1)
