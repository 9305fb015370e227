"""Rows R4, R8 and R10 to R12: seeds of workers, samplers that raise, and odd keys.

`test_parity` compares with torch what is drawn from which generator and when (R1 to R3, R5 to R7, R9, R10b).
"""

from __future__ import annotations

import collections
import datetime
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils.worker import _generate_state

from fastq_loader import DataLoader
from tests.support.datasets import (
    BatchEcho,
    Colour,
    Echo,
    FailingSampler,
    Made,
    Point,
    Stream,
    assert_same,
    identity,
)
from tests.support.gates import Gates
from tests.support.loaders import MANY_WORKERS, WORKERS, exactly, seed_all, torch_has
from tests.support.thorough import thorough

pytestmark = [pytest.mark.processes, MANY_WORKERS]


def own_worker() -> int:
    info = get_worker_info()
    assert info is not None
    return info.id


def draw_as_worker(index: int) -> dict[str, Any]:
    """Draws of each global generator, and who made them."""
    info = get_worker_info()
    assert info is not None
    return {
        "id": info.id,
        "seed": info.seed,
        "drawn": draw(),
        "by init": getattr(info.dataset, "before", None),
    }


def draw() -> tuple[list[float], list[float], list[float]]:
    return torch.rand(5).tolist(), [random.random() for _ in range(5)], np.random.rand(5).tolist()


def draw_in_init(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.before = draw()


@thorough(after=1)
@pytest.mark.parametrize("given", [False, True])
def test_r4_worker_seeds_are_base_plus_id_and_numpys_a_hash_of_both(given: bool) -> None:
    drawn = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(11))
    base = int(drawn.item())
    torch.manual_seed(0 if given else 11)
    generator = torch.Generator().manual_seed(11) if given else None
    arguments: dict[str, Any] = {"collate_fn": list, "worker_init_fn": draw_in_init}
    loader = DataLoader(Made(draw_as_worker, 2), num_workers=2, generator=generator, **arguments)
    for worker, (sample,) in enumerate(exactly(2, loader)):
        assert (sample["id"], sample["seed"]) == (worker, base + worker)
        seed_all(base + worker, base + worker, _generate_state(base, worker))
        assert [sample["by init"], sample["drawn"]] == [draw(), draw()], "seeds come before worker_init_fn"


@thorough(but={"workers": [0, 2], "prefetch": [None, 2]})
@pytest.mark.parametrize("keys", [[[0, 1], [2, 3]], []], ids=["at the third", "at the first"])
@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (1, 1), (1, 4), (2, 1), (2, 2)])
def test_r8_batches_before_a_sampler_error_are_delivered_first(
    keys: list[list[int]], workers: int, prefetch: int | None
) -> None:
    arguments: dict[str, Any] = {"prefetch_factor": prefetch, "persistent_workers": workers == 2}
    with DataLoader(range(9), batch_sampler=FailingSampler(keys), num_workers=workers, **arguments) as loader:
        for _ in range(2):
            iterator = iter(loader)
            assert [next(iterator).tolist() for _ in keys] == keys
            with pytest.raises(LookupError, match=f"no key after {len(keys)}"):
                next(iterator)
            with pytest.raises(StopIteration):  # the sampler is a generator: it has nothing more to give
                next(iterator)


class HeldUp(Stream):
    """Worker 0 waits at a gate."""

    gates: Gates

    def __iter__(self) -> Iterator[Any]:
        if own_worker() == 0:
            self.gates.wait_at(0)
        return super().__iter__()


def test_r10_a_stream_out_of_order_loses_nothing(tmp_path: Path) -> None:
    stream, gates = HeldUp("tensors", [3, 20]), Gates(tmp_path)
    stream.gates = gates
    iterator = iter(DataLoader(stream, 2, num_workers=2, in_order=False))
    batches = [next(iterator)[1].tolist()]
    assert batches == [[1000, 1001]]
    gates.open(0)
    batches += [labels.tolist() for _, labels in iterator]
    assert [batch for batch in batches if batch[0] < 1000] == [[0, 1], [2]]
    assert [batch for batch in batches if batch[0] >= 1000] == [[i, i + 1] for i in range(1000, 1020, 2)]


class Gated(Dataset):
    """A sample of worker k waits until the test opens gate k once more."""

    def __init__(self, size: int, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.size = size
        self.gates = [context.Semaphore(0) for _ in range(workers)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        worker = own_worker()
        assert self.gates[worker].acquire(timeout=30)
        return index, worker


def play(kind: type, script: Sequence[int], workers: int, prefetch: int) -> list[tuple[int, int]]:
    """(sample, worker) in the order of delivery when workers finish in the order of the script."""
    gated = Gated(len(script), workers)
    options = {"num_workers": workers, "prefetch_factor": prefetch, "multiprocessing_context": "fork"}
    loader = kind(gated, batch_size=None, in_order=False, timeout=30, **options)
    iterator = iter(loader)
    delivered = []
    for worker in script:
        gated.gates[worker].release()
        delivered.append(next(iterator))
    with pytest.raises(StopIteration):
        next(iterator)
    return delivered


def feasible_script(seed: int, samples: int, workers: int, prefetch: int) -> list[int]:
    """An order of completions in which a worker finishes only what it has."""
    rng = random.Random(seed)
    waiting = [prefetch] * workers
    unsent = samples - sum(waiting)
    script = []
    for _ in range(samples):
        script.append(worker := rng.choice([w for w in range(workers) if waiting[w]]))
        waiting[worker] -= unsent <= 0
        unsent -= 1
    return script


SCRIPTS = [
    *((w, p, feasible_script(seed, 18, w, p)) for seed, w, p in [(2, 3, 2), (0, 2, 2), (1, 3, 1), (3, 2, 4)]),
    *((2, prefetch, [1] * (12 - prefetch) + [0] * prefetch) for prefetch in (1, 2, 3)),  # worker 0 is slow
]


@pytest.mark.skipif(not torch_has("_workers_num_tasks"), reason="this torch hands out tasks in turn")
@thorough(after=1)
@pytest.mark.parametrize(("workers", "prefetch", "script"), SCRIPTS)
def test_r10_the_choice_of_the_next_worker_is_torchs_for_any_order_of_completion(
    workers: int, prefetch: int, script: list[int]
) -> None:
    torchs, ours = (play(kind, script, workers, prefetch) for kind in (TorchDataLoader, DataLoader))
    assert torchs == ours
    assert [worker for _, worker in ours] == script


#: More of them are in `ipc/test_messages.py`.
ODD_KEYS: list[Any] = [
    *(True, None, 1.5, "ä\ud800", b"bytes", 2**63, -(2**70), np.int64(3), np.float32(0.1), np.str_("text")),
    *((1, (2, "three")), [1, [2, 3]], {"a": 1, (1, 2): {3}}, frozenset({1, "a"}), slice(1, 10, 2), ..., int),
    *(torch.tensor(3), np.arange(4, dtype=np.int16), datetime.date(2024, 2, 29), Colour.BLUE, Point(1, 2)),
]
ODD_BATCHES: list[Any] = [
    *([1, 2], (1, 2), range(3), np.arange(3), torch.arange(3), collections.deque([1, 2]), {1, 2}),
    *("ab", {"a": 1}, Point(1, 2), 5, None),
]


@thorough(but={"workers": 2})
@WORKERS
def test_r11_odd_keys_reach_the_dataset_with_value_type_and_container(workers: int) -> None:
    arguments: dict[str, Any] = {"num_workers": workers, "collate_fn": identity}
    singly = DataLoader(Echo(), batch_size=None, sampler=ODD_KEYS, **arguments)
    for key, echoed in zip(ODD_KEYS, singly, strict=True):
        assert_same(Echo()[key], echoed, f"key {key!r}")
    batches = [[0, key, 1] for key in ODD_KEYS] + [list(range(5000)), []]
    for batch, samples in zip(batches, DataLoader(Echo(), batch_sampler=batches, **arguments), strict=True):
        assert_same([Echo()[key] for key in batch], samples, f"keys {batch[:3]!r}")
    together = DataLoader(BatchEcho(), batch_sampler=ODD_BATCHES, **arguments)
    for keys, (container, echoed) in zip(ODD_BATCHES, together, strict=True):
        assert container is type(keys)
        assert_same(keys, echoed, f"keys {keys!r}")
