"""Rows I6 to I8, P2, P7, P12, P13 and a part of P6b: errors in workers, dead workers and slow workers."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, ToDevice
from fastq_loader.errors import WorkerDied
from fastq_loader.workers import stopping
from tests.conftest import descendants, wait_until
from tests.support import crimes
from tests.support.crimes import Crime, CrimeAt, CrimeInIter, CrimeInStream, FailsToUnpickle, Rows
from tests.support.datasets import Made, Opaque
from tests.support.gates import LIMIT, Gates, at_rest, end_timeout_when
from tests.support.loaders import MANY_WORKERS, PERSISTENT
from tests.support.thorough import thorough

pytestmark = [pytest.mark.processes, MANY_WORKERS]


def outcomes(batches: Iterable[Any], limit: int = 20) -> list[Any]:
    """The outcome of each `next()` until StopIteration, at most `limit`: a batch as a list, or an error."""
    iterator, found = iter(batches), list[Any]()
    while len(found) < limit:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            found.append(error)
        else:
            found.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
    return found


def committing(crime: Crime, at: int = 5, workers: int = 2, **options: Any) -> list[Any]:
    """The outcomes of six batches of two with a crime in one."""
    return outcomes(DataLoader(CrimeAt(crime, at=at), 2, num_workers=workers, **options))


def kinds(found: list[Any]) -> list[Any]:
    """The outcomes, each exception replaced by its type."""
    return [type(outcome) if isinstance(outcome, Exception) else outcome for outcome in found]


def text_of(error: BaseException) -> str:
    """Everything that a traceback would print about an error: its own text, its notes and its causes."""
    causes = [cause for cause in (error.__cause__, error.__context__) if cause is not None]
    return "\n".join([str(error), *getattr(error, "__notes__", ()), *map(text_of, causes)])


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


PAIRS = [[2 * i, 2 * i + 1] for i in range(6)]


@thorough(but={"workers": [0, 2], "at": 5})
@pytest.mark.parametrize(
    ("crime", "kind", "text"),
    [
        (crimes.raise_value_error, ValueError, "sample {at} is broken"),
        (crimes.raise_stop_iteration, RuntimeError, "StopIteration"),
    ],
)
@pytest.mark.parametrize(("workers", "at"), [(0, 5), (1, 5), (2, 5), (3, 5), (2, 0), (2, 11)])
def test_i6_i7_an_error_is_raised_at_its_position_and_iteration_goes_on(
    crime: Crime, kind: type, text: str, workers: int, at: int
) -> None:
    """So is a StopIteration, which ends no epoch."""
    found = committing(crime, at, workers)
    assert kinds(found) == [*PAIRS[: at // 2], kind, *PAIRS[at // 2 + 1 :]]
    assert text.format(at=at) in text_of(found[at // 2])


@thorough(after=1)
@pytest.mark.parametrize("at", [5, 0])
def test_i7_errors_in_a_stream_are_torchs(at: int) -> None:
    dataset = CrimeInStream(crimes.raise_value_error, at)
    theirs, ours = (
        kinds(outcomes(loader(dataset, batch_size=2, num_workers=2)))
        for loader in (TorchDataLoader, DataLoader)
    )
    assert theirs.count(ValueError) == 2
    assert ours == theirs


def test_i7_an_error_is_the_one_that_no_workers_would_give() -> None:
    """And the worker's traceback is its cause."""
    (expected, error) = (committing(crimes.raise_os_error, workers=workers)[2] for workers in (0, 2))
    if hasattr(error, "add_note"):  # Python 3.11
        assert "worker process 0" in vars(error).pop("__notes__")[0]
    assert (vars(error).pop("worker"), vars(expected).pop("worker")) == (0, None)
    for trait in (type, str, vars, lambda one: one.args, lambda one: one.filename):
        assert trait(error) == trait(expected)
    cause = str(error.__cause__)
    assert re.search(r"(?s)DataLoader worker process 0.*Original Traceback.*raise_os_error", cause)


class StopsAt:
    """A sampler that fails in place of its third batch."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from [[0, 1], [2, 3]]
        raise ValueError("no third one")


class NotHere:
    """It cannot be made again in the process that it was made for."""

    def __init__(self, here: int) -> None:
        self.here = here

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse_third, (self.here,)


def refuse_third(value: int) -> int:
    if value == 4:
        raise ValueError("it cannot be made again")
    return value


def not_here(batch: Any) -> Any:
    return list(map(NotHere, batch))


def refuse_four(batch: Any) -> Any:
    return [refuse_third(int(value)) for value in batch]


@pytest.mark.parametrize(
    ("workers", "worker", "index", "options"),
    [
        (0, None, [4, 5], {"dataset": CrimeAt(crimes.raise_value_error, at=5)}),
        (2, 0, [4, 5], {"dataset": CrimeAt(crimes.raise_value_error, at=5)}),
        (0, None, None, {"batch_sampler": StopsAt()}),
        (2, None, None, {"batch_sampler": StopsAt()}),
        (0, None, [4, 5], {"collate_fn": refuse_four}),
        (2, 0, [4, 5], {"collate_fn": refuse_four}),
        (2, 0, [4, 5], {"collate_fn": not_here}),
        (0, None, [4, 5], {"device": ToDevice("cpu", transform=refuse_four)}),
        (2, 0, [4, 5], {"device": ToDevice("cpu", transform=refuse_four)}),
    ],
)
def test_i7_an_error_says_which_batch_it_is_about_wherever_it_was_raised(
    workers: int, worker: int | None, index: Any, options: dict[str, Any]
) -> None:
    size = {} if "batch_sampler" in options else {"batch_size": 2}
    error: Any = outcomes(DataLoader(**{"dataset": range(12), **size, **options}, num_workers=workers))[2]
    assert isinstance(error, ValueError)
    assert (error.batch, error.index, error.worker) == (2, index, worker)
    assert json.dumps(error.index)


def test_i8_a_batch_that_cannot_be_pickled_raises_at_once_and_names_the_reason() -> None:
    found = committing(crimes.return_lambda, collate_fn=list, timeout=10)
    assert [found[:2], found[3:]] == [PAIRS[:2], PAIRS[3:]]
    assert "lambda" in text_of(found[2])


@thorough(but={"crime": [crimes.kill_itself, crimes.exit_with_7]})
@pytest.mark.parametrize(
    ("crime", "torchs_text", "how"),
    [
        (crimes.kill_itself, r"is killed by signal: Killed\. ", "SIGKILL"),
        (
            crimes.exit_with_7,
            r"exited unexpectedly with exit code 7\. Details are lost due to multiprocessing\. "
            r"Rerunning with num_workers=0 may give better error trace\.",
            r"\b7\b",
        ),
        (crimes.exit_with_0, "exited unexpectedly", r"\b0\b"),
        (crimes.system_exit, "exited unexpectedly with exit code 3", r"\b3\b"),
    ],
)
def test_p2_a_workers_death_is_told_in_full_within_a_second(crime: Crime, torchs_text: str, how: str) -> None:
    """In our words, with torch's as the cause."""
    iterator = iter(DataLoader(CrimeAt(crime, at=4), batch_size=2, num_workers=2))
    pids = set(descendants())
    assert [next(iterator).tolist() for _ in range(2)] == PAIRS[:2]
    with within(10), pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        next(iterator)
    text, cause = str(caught.value), str(caught.value.__cause__)
    found = re.search(r"DataLoader worker \(pid (\d+)\) " + torchs_text, cause)
    assert found is not None, cause
    assert int(found[1]) in pids
    assert {int(pid) for pid in re.findall(r"pid\D{0,4}(\d+)", text)} & pids
    for pattern in (how, r"worker 0\b", r"batch 2\b", r"indices\D*\b4\b\D+\b5\b"):
        assert re.search(pattern, text)


@thorough(after=1)
@PERSISTENT
def test_p2_a_death_ends_the_iterator_and_the_loader_starts_anew(persistent: bool) -> None:
    dataset = CrimeAt(crimes.kill_itself, at=4)
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        iterator = iter(loader)
        assert kinds(outcomes(iterator)) == [*PAIRS[:2], WorkerDied]
        assert outcomes(iterator) == []
        assert wait_until(lambda: not descendants(), LIMIT)
    loader.close()


def test_p2_a_persistent_worker_killed_between_epochs_is_noticed_and_replaced() -> None:
    with DataLoader(range(12), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        assert outcomes(loader) == PAIRS
        victim = min(descendants())
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: victim not in descendants() or descendants()[victim].zombie, LIMIT)
        with within(10), pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
            list(loader)
        assert outcomes(loader) == PAIRS
        assert victim not in descendants()


INIT = {"worker_init_fn": crimes.init_raises}
FORKSERVER, SPAWN = ({"multiprocessing_context": method} for method in ("forkserver", "spawn"))
UNPICKLING = "this dataset does not survive the journey", "__setstate__"


@pytest.mark.usefixtures("warm_interpreter")
@pytest.mark.parametrize(
    ("dataset", "workers", "options", "text", "where"),
    [
        (range(12), 1, INIT, "worker 0 cannot start", "init_raises"),
        (range(12), 2, {**INIT, "persistent_workers": True}, "worker 0 cannot start", "init_raises"),
        (range(12), 2, {"worker_init_fn": crimes.init_raises_in_worker_1}, "worker 1 cannot start", ""),
        (range(12), 1, {**INIT, "schedule": "dynamic"}, "worker 0 cannot start", "init_raises"),
        (CrimeInIter(), 2, {}, "no stream to read", "__iter__"),
        (FailsToUnpickle(), 2, FORKSERVER, *UNPICKLING),
        pytest.param(FailsToUnpickle(), 2, SPAWN, *UNPICKLING, marks=thorough()),
    ],
    ids=["init", "every init", "one init", "dynamic", "iter", "unpickling", "unpickling, spawned"],
)
def test_p7_what_fails_at_the_start_surfaces_once(
    dataset: Any, workers: int, options: dict[str, Any], text: str, where: str, capfd: Any
) -> None:
    loader = DataLoader(dataset, 2, num_workers=workers, **options)
    (error,) = (outcome for outcome in outcomes(loader) if isinstance(outcome, Exception))
    assert repr(error) == f"ValueError({text!r})"
    assert re.search(rf"(?s)DataLoader worker process \d.*{where}", str(error.__cause__))
    assert "Traceback" not in capfd.readouterr().err, "it belongs into the error, not on the terminal"
    loader.close()


def test_p7_an_init_function_that_exits() -> None:
    loader = DataLoader(range(12), 2, worker_init_fn=crimes.init_exits, num_workers=2)
    with within(20), pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(loader)
    assert "exit code 5" in text_of(caught.value)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"dataset": Made(Opaque(Lock()), 4)}, ["dataset", "make", "value"]),
        ({"dataset": [0, sys.stdout.buffer]}, ["dataset[1]"]),
        ({"worker_init_fn": Opaque(Opaque(Lock()))}, ["worker_init_fn", "value.value"]),
        ({"collate_fn": partial(max, Opaque(Lock()))}, ["collate_fn", "value"]),
    ],
    ids=["dataset", "list", "worker_init_fn", "partial"],
)
@thorough(but={"method": "forkserver"})
@pytest.mark.usefixtures("warm_interpreter")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_p13_what_cannot_be_pickled_warns_as_in_torch_and_is_named(
    arguments: dict[str, Any], path: list[str], method: str
) -> None:
    loader = DataLoader(**{"dataset": Rows(4), **arguments}, num_workers=2, multiprocessing_context=method)
    with (
        pytest.warns(UserWarning, match="Got pickle error when"),
        pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as caught,
    ):
        iter(loader)
    text = text_of(caught.value)
    assert [name for name in path if name not in text] == []


def arrive_and(crime: Crime, gates: Gates, index: int) -> Any:
    gates.arrive("crime")
    return crime(index)


@thorough(after=1)
@pytest.mark.parametrize(
    ("crime", "schedule"), [(crimes.dawdle, "dynamic"), (crimes.ignore_sigterm_and_hang, "round_robin")]
)
def test_p12_a_timeout_says_so_in_torchs_words_and_shows_where_the_worker_is(
    crime: Crime, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(tmp_path)
    end_timeout_when(lambda: any(map(at_rest, gates.arrived("crime"))), monkeypatch)
    monkeypatch.setattr(stopping, "ORDERLY", 0.1)
    dataset = CrimeAt(partial(arrive_and, crime, gates), at=4)
    loader = DataLoader(dataset, 2, num_workers=2, timeout=1000, schedule=schedule)
    found = outcomes(loader, limit=4)
    loader.close()
    assert found[:2] == PAIRS[:2]
    for error in found[2:]:
        assert isinstance(error, RuntimeError)
        assert "DataLoader timed out after 1000 seconds" in str(error)
        for pattern in (crime.__name__, r"worker \d\b", r"indices\D*\b4\b\D+\b5\b"):
            assert re.search(pattern, text_of(error))


class Sent:
    """An index that cannot be made in another process."""

    def __reduce__(self) -> Any:
        return _made_in, (os.getpid(),)


def _made_in(process: int) -> Any:
    if os.getpid() != process:
        raise ValueError("no index")


def test_an_index_that_cannot_be_unpickled_in_a_worker_is_an_error_of_its_batch() -> None:
    data = DataLoader(Made(torch.tensor, 9), batch_size=None, sampler=[3, Sent(), 5], num_workers=1)
    first, error, last = outcomes(data)
    assert (first, str(error), last) == (3, "no index", 5)
