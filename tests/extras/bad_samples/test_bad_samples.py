"""errors=Replace() and Skip(): the same batches, counts and errors for any number of workers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

from fastq_loader import (
    BadSample,
    BadSampleFound,
    DataLoader,
    PermutationSampler,
    Processes,
    Replace,
    RoundRobin,
    Skip,
    StatefulDataLoader,
)
from tests.conftest import of_kind
from tests.support.datasets import FaultyStream, UnevenBatches
from tests.support.loaders import WORKERS
from tests.support.thorough import seeds, thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::fastq_loader.BadSampleFound"),
]


@dataclass(eq=False)
class Files(Dataset[Any]):
    """Some cannot be read; the worker that reads `deadly` for the first time is killed."""

    size: int
    bad: frozenset[int]
    deadly: int = -1
    mark: str = ""
    error: type[Exception] = OSError

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index == self.deadly and get_worker_info() is not None and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.bad:
            raise self.error(f"file {index} is broken")
        return index


class Stateful(Files):
    """It says how many it has read; every worker has its own."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


def values(batch: Any) -> Any:
    batch = batch[1] if isinstance(batch, list) else batch  # of a stream
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def drawn(seed: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all loaders of a configuration have, and what only those with workers have."""
    rng = random.Random(seed)
    size = rng.choice([40, 61, 100])
    bad = frozenset(rng.sample(range(size), max(1, int(size * rng.choice([0.01, 0.3])))))
    dataset = Files(size, bad)
    options: dict[str, Any] = {"batch_size": rng.choice([1, 3, 8]), "drop_last": rng.random() < 0.3}
    kinds: dict[str, dict[str, Any]] = {
        "sequential": options,
        "permuted": {**options, "sampler": PermutationSampler(size, seed=seed)},
        "ranks": {**options, "sampler": DistributedSampler(dataset, 2, seed % 2, seed=seed)},
        "batches": {"batch_sampler": UnevenBatches(size)},
        "single": {"batch_size": None},
    }
    kind = rng.choice(list(kinds))
    replaces = rng.random() < 0.5 and kind != "batches"  # a batch of bad samples alone raises
    own: dict[str, Any] = {
        "num_workers": rng.choice([1, 2, 2, 3, 5]),
        "schedule": rng.choice(["round_robin", "dynamic", RoundRobin(save_generators=True)]),
        "persistent_workers": rng.random() < 0.4,
        "in_order": rng.random() < 0.8,
        "multiprocessing_context": "fork" if seed % 50 < 49 else "spawn",
    }
    if own["schedule"] == "dynamic" and rng.random() < 0.7:
        own["workers"] = Processes(max_restarts=3)
        dataset.deadly, dataset.mark = rng.choice(sorted(set(range(size)) - bad)), str(folder / "killed")
    errors = Replace(limit=None) if replaces else Skip(limit=None)
    return {"dataset": dataset, "errors": errors, **kinds[kind]}, own


def epochs(loader: Any, ordered: bool = True, stop: int | None = None) -> list[Any]:
    """Two epochs' batches, or those of the first up to a number of them."""
    found = []
    for epoch in range(2 if stop is None else 1):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        found.append([values(batch) for batch in islice(loader, stop)])
    return found if ordered else [sorted(batches, key=str) for batches in found]


def noted(loader: Any, ordered: bool = True) -> list[BadSample]:
    statistics = loader.statistics()
    assert statistics.bad_samples == len(statistics.last_bad_samples) <= 1000
    found = list(statistics.last_bad_samples)
    return found if ordered else sorted(found, key=lambda bad: (bad.epoch, bad.batch))


@pytest.mark.filterwarnings("ignore::fastq_loader.WorkerReplaced")
@seeds(1, 18)
def test_a_drawn_loader_gives_what_it_gives_without_workers(seed: int, tmp_path: Path) -> None:
    shared, own = drawn(seed, tmp_path)
    what, ordered = f"seed {seed}: {shared} {own}", own["in_order"]
    serial = DataLoader(**shared)
    expected, bad = epochs(serial, ordered), noted(serial, ordered)
    assert bad, what
    with DataLoader(**shared, **own) as loader:
        assert epochs(loader, ordered) == expected, what
        assert noted(loader, ordered) == bad, what
    if not expected[0]:
        return
    stop = random.Random(seed).randrange(len(expected[0])) + 1
    with StatefulDataLoader(**shared, **own) as loader:
        first = epochs(loader, stop=stop)[0]
        state = json.loads(json.dumps(loader.state_dict()))
    with StatefulDataLoader(**shared, **{**own, "in_order": True}) as again:
        again.load_state_dict(state)
        assert again.state_dict()["rest"] == state["rest"], what
        whole = first + [values(batch) for batch in again]
        assert (whole if ordered else sorted(whole, key=str)) == expected[0], f"after {stop}, {what}"
        assert noted(again, ordered) == [each for each in bad if each.epoch == 0], f"after {stop}, {what}"


@thorough(after=1)
@pytest.mark.parametrize("errors", [Replace(limit=7), Skip(limit=7), Skip(limit=0.008)])
def test_beyond_the_limit_the_last_error_is_raised_with_a_list_at_the_same_batch(errors: Any) -> None:
    def run(workers: int, **options: Any) -> tuple[list[Any], list[str]]:
        dataset = Files(60, frozenset(range(1, 60, 5)))
        with DataLoader(dataset, 4, errors=errors, num_workers=workers, **options) as loader:
            found: list[Any] = []
            notes: list[str] = []
            iterator = iter(loader)
            while len(found) < 15:
                try:
                    found.append(values(next(iterator)))
                except OSError as error:
                    found.append((str(error), error.batch))  # type: ignore[attr-defined]
                    notes.append("".join(getattr(error, "__notes__", ())))
            assert next(iterator, None) is None
            refused = sum(isinstance(each, tuple) for each in found)
            assert loader.statistics().batches == len(found) - refused
            return found, notes

    expected, notes = run(0)
    failed = [each for each in expected if isinstance(each, tuple)]
    assert failed
    assert all(str(error) == f"file {error.rsplit()[1]} is broken" for error, _ in failed)
    for options in ({"workers": 1}, {"workers": 3}, {"workers": 2, "schedule": "dynamic"}):
        found, others = run(**options)
        assert found == expected
        assert [text[text.find("errors=") :] for text in others] == notes
    if hasattr(BaseException, "add_note"):
        bad = sum(text.count("could not be read and") for text in notes[:1])
        among = "samples and their replacements" if type(errors) is Replace else "samples"
        assert re.match(rf"errors={re.escape(str(errors))}: {bad} of (32|40|44) {among} could not", notes[0])
        assert 7 < bad <= 10


@thorough(but={"workers": 2})
@WORKERS
def test_the_first_one_is_warned_of_once_and_as_an_error_costs_no_batch(workers: int, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    loader = DataLoader(Files(12, frozenset({1, 6})), 2, errors=Skip(path=path), num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(loader))  # an epoch that is broken off loses it not
        assert of_kind(caught, BadSampleFound) == []
        assert [values(batch) for batch in loader] == [[0], [2, 3], [4, 5], [7], [8, 9], [10, 11]]
    (warning,) = of_kind(caught, BadSampleFound)
    text = "sample 1 of batch 0, epoch 0, could not be read and was left out: OSError: file 1 is broken"
    assert text in str(warning.message)
    assert warning.filename == __file__
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == [vars(each) for each in noted(loader)]
    assert [(each["epoch"], each["index"]) for each in written] == [(0, 1), (1, 1), (1, 6)]
    loader = DataLoader(Files(12, frozenset({11})), 1, errors=Skip(path=tmp_path), num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BadSampleFound)
        iterator, found, told = iter(loader), [], []
        while len(found) + len(told) < 13:
            try:
                found.append(values(next(iterator)))
            except BadSampleFound as raised:
                told.append(str(raised))
        assert next(iterator, None) is None
    assert found == [[each] for each in range(11)]
    assert len(told) == 2
    assert "not written" in told[1]


@thorough(after=1)
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"schedule": "dynamic"}])
def test_a_stream_is_left_out_of_and_goes_on_where_it_stood(options: Any) -> None:
    lines = FaultyStream("tensors", (15, 15))
    for own in ({}, {**options, "num_workers": 2}):
        with StatefulDataLoader(lines, 4, errors=Skip(), **own) as loader:
            batches = [values(batch) for batch in loader]
            found = sorted(number for batch in batches for number in batch)
            assert found == [n for n in (*range(15), *range(1000, 1015)) if n % 3 != 2]
            assert len(noted(loader)) == 10
            state: Any = None
            for _ in islice(loader, 3):
                state = json.loads(json.dumps(loader.state_dict()))
        with StatefulDataLoader(lines, 4, errors=Skip(), **own) as again:
            again.load_state_dict(state)
            with pytest.warns(UserWarning, match="read again"):
                assert [values(batch) for batch in again] == batches[3:]
            assert len(noted(again)) == 20


@thorough(but={"workers": 2})
@WORKERS
def test_batches_without_any_sample_are_left_out_also_around_a_resume(workers: int) -> None:
    def make() -> Any:
        bad = frozenset([*range(4, 12), *range(20, 24)])
        return StatefulDataLoader(Stateful(24, bad), 4, errors=Skip(limit=None), num_workers=workers)

    loader = make()
    assert len(list(loader)) == 3
    seen, batches = [], [[0, 1, 2, 3], [12, 13, 14, 15], [16, 17, 18, 19]]
    for at, batch in enumerate(loader):
        seen.append(values(batch))
        state = json.loads(json.dumps(loader.state_dict()))
        again = make()
        again.load_state_dict(state)
        assert [values(batch) for batch in again] == batches[at + 1 :]
        assert len(noted(again)) == 24
        assert again.position.epoch == 2
    assert seen == batches
    assert loader.position == (2, 0, 12)
    with DataLoader(Files(8, frozenset(range(8))), 2, errors=Skip(), num_workers=workers) as empty:
        assert list(empty) == []


@thorough(but={"workers": 2})
@WORKERS
def test_errors_of_others_are_raised_as_ever(workers: int) -> None:
    def sampler() -> Iterator[int]:
        yield from range(4)
        raise LookupError("sampler")

    arguments: dict[str, Any] = {"errors": Skip(), "num_workers": workers}
    with DataLoader(Files(8, frozenset({1})), 2, sampler=sampler(), **arguments) as loader:
        iterator = iter(loader)
        assert [values(next(iterator)) for _ in range(2)] == [[0], [2, 3]]
        with pytest.raises(LookupError, match="sampler"):
            next(iterator)
    with DataLoader(Files(8, frozenset({1, 4})), 2, collate_fn=fail, **arguments) as loader:
        iterator = iter(loader)
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                next(iterator)
        assert noted(loader) == []


def fail(data: Any) -> Any:
    return 1 / 0


def test_a_resumed_epoch_counts_the_samples_that_were_read_before() -> None:
    """3 of 4,000 are allowed, and 3 of the last 1,000 are not."""
    first, second = (
        StatefulDataLoader(Files(4000, frozenset({3997, 3998, 3999})), 100, errors=Skip(limit=0.001))
        for _ in range(2)
    )
    for _ in islice(iter(first), 30):
        state = first.state_dict()
    second.load_state_dict(state)
    assert sum(map(len, second)) == 997
