"""torch's datapipe graphs: shared seeds and shards, and other datasets left alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.iter import IterableWrapper

from fastq_loader.reading import datapipes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of datapipes on their way out


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
