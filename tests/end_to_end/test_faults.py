"""Rows I6 to I8, P2, P7, P12, P13 and a part of P6b: errors in workers, dead workers and slow workers."""

from __future__ import annotations

import functools
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader
from fastq_loader.errors import describe_index
from tests.conftest import descendants, wait_until
from tests.support import crimes
from tests.support.crimes import (
    Crime,
    CrimeAt,
    CrimeInIter,
    CrimeInStream,
    FailsToUnpickle,
    HoldsUnpicklable,
    Rows,
)


def outcomes(batches: Iterable[Any], limit: int = 20) -> list[Any]:
    """What each `next()` gave until StopIteration, at most `limit` times: a batch as a list or an error."""

    def one(iterator: Iterator[Any]) -> Any:
        try:
            batch = next(iterator)
        except StopIteration:
            return None
        except Exception as error:
            return error
        return batch.tolist() if isinstance(batch, torch.Tensor) else batch

    iterator = iter(batches)
    return list(islice(iter(lambda: one(iterator), None), limit))


def kinds(found: list[Any]) -> list[Any]:
    """The outcomes, each exception replaced by its type."""
    return [type(outcome) if isinstance(outcome, Exception) else outcome for outcome in found]


def text_of(error: BaseException) -> str:
    """Everything that a traceback would print about an error: its own text, its notes and its causes."""
    causes = [cause for cause in (error.__cause__, error.__context__) if cause is not None]
    return "\n".join([str(error), *getattr(error, "__notes__", ()), *map(text_of, causes)])


PAIRS = [[2 * i, 2 * i + 1] for i in range(6)]


# I6: StopIteration is an error


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_i6_stop_iteration_inside_a_sample_is_an_error(workers: int) -> None:
    dataset = CrimeAt(crimes.raise_stop_iteration, at=5)
    found = outcomes(DataLoader(dataset, batch_size=2, num_workers=workers))
    assert [found[:2], found[3:]] == [PAIRS[:2], PAIRS[3:]]
    assert isinstance(found[2], RuntimeError)
    assert "StopIteration" in text_of(found[2])


# I7: errors have a place, a type and attributes


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_i7_an_error_is_raised_at_its_position_and_iteration_goes_on(workers: int) -> None:
    dataset = CrimeAt(crimes.raise_value_error, at=5)
    found = outcomes(DataLoader(dataset, batch_size=2, num_workers=workers))
    assert kinds(found) == [*PAIRS[:2], ValueError, *PAIRS[3:]]
    assert "sample 5 is broken" in str(found[2])


@pytest.mark.processes
@pytest.mark.parametrize("at", [0, 11])
def test_i7_errors_in_the_first_and_the_last_batch(at: int) -> None:
    found = outcomes(DataLoader(CrimeAt(crimes.raise_value_error, at=at), batch_size=2, num_workers=2))
    expected: list[Any] = list(PAIRS)
    expected[at // 2] = ValueError
    assert kinds(found) == expected


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_i7_every_batch_may_fail(workers: int) -> None:
    loader = DataLoader(range(12), batch_size=2, num_workers=workers, collate_fn=crimes.raise_value_error)
    assert kinds(outcomes(loader)) == [ValueError] * 6


@pytest.mark.processes
def test_i7_persistent_workers_survive_an_error() -> None:
    dataset = CrimeAt(crimes.raise_value_error, at=5)
    with DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True) as loader:
        pids = set()
        for _ in range(3):
            assert kinds(outcomes(loader)) == [*PAIRS[:2], ValueError, *PAIRS[3:]]
            pids.add(frozenset(descendants()))
        assert len(pids) == 1


@pytest.mark.processes
@pytest.mark.parametrize("at", [0, 5])
def test_i7_errors_in_a_stream_are_torchs(at: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": 2}
    dataset = CrimeInStream(crimes.raise_value_error, at)
    expected = kinds(outcomes(TorchDataLoader(dataset, **arguments)))
    assert expected.count(ValueError) == 2
    assert kinds(outcomes(DataLoader(dataset, **arguments))) == expected


def traits(error: BaseException) -> dict[str, Any]:
    """What a handler may look at: type, arguments, attributes, text."""
    found = {"type": type(error), "args": error.args, **vars(error)}
    for name in ("errno", "strerror", "filename", "object", "start", "reason"):
        if hasattr(error, name):
            found[name] = getattr(error, name)
    if not isinstance(error, crimes.Unprintable):
        found["text"] = str(error)
    return found


ERRORS = [
    crimes.raise_value_error,
    crimes.raise_key_error,
    crimes.raise_os_error,
    crimes.raise_file_not_found,
    crimes.raise_unicode_error,
    crimes.raise_two_arguments,
    crimes.raise_keyword_only,
    crimes.raise_unprintable,
    crimes.raise_from_another,
]


@pytest.mark.processes
@pytest.mark.parametrize("crime", ERRORS)
def test_i7_an_error_is_the_one_that_no_workers_would_give(crime: Crime) -> None:
    here, there = (
        outcomes(DataLoader(CrimeAt(crime, at=5), batch_size=2, num_workers=workers)) for workers in (0, 2)
    )
    assert kinds(there) == kinds(here)
    expected, error = traits(here[2]), traits(there[2])
    assert {name: error.get(name) for name in expected} == expected


@pytest.mark.processes
@pytest.mark.parametrize("crime", [crimes.raise_value_error, crimes.raise_two_arguments])
def test_i7_the_workers_traceback_is_the_cause(crime: Crime) -> None:
    found = outcomes(DataLoader(CrimeAt(crime, at=2), batch_size=2, num_workers=2))
    cause = str(found[1].__cause__)
    assert "Original Traceback" in cause
    assert "DataLoader worker process 1" in cause
    assert crime.__name__ in cause


@pytest.mark.processes
def test_i7_the_cause_shows_what_the_error_was_raised_from() -> None:
    found = outcomes(DataLoader(CrimeAt(crimes.raise_from_another, at=0), batch_size=2, num_workers=2))
    cause = str(found[0].__cause__)
    assert "sample 0 has no label" in cause
    assert "KeyError: ('missing', 0)" in cause
    assert "direct cause" in cause


@pytest.mark.processes
@pytest.mark.parametrize(
    ("crime", "name", "text"),
    [
        (crimes.raise_holding_a_lock, "HoldsLock", "sample 5 is locked"),
        (crimes.raise_local_type, "NobodyCanImportThis", "sample 5 is local"),
    ],
)
def test_i7_an_error_that_cannot_be_pickled_keeps_its_name_text_and_place(
    crime: Crime, name: str, text: str
) -> None:
    start = time.monotonic()
    found = outcomes(DataLoader(CrimeAt(crime, at=5), batch_size=2, num_workers=2))
    assert time.monotonic() - start < 5
    assert [found[:2], found[3:]] == [PAIRS[:2], PAIRS[3:]]
    assert name in f"{type(found[2]).__name__} {found[2]}"
    assert text in str(found[2])
    assert "DataLoader worker process 0" in str(found[2].__cause__)


@pytest.mark.processes
def test_i7_system_exit_in_a_sample_does_not_hang() -> None:
    start = time.monotonic()
    loader = DataLoader(CrimeAt(crimes.system_exit, at=5), batch_size=2, num_workers=2)
    with pytest.raises((RuntimeError, SystemExit)):
        list(loader)
    assert time.monotonic() - start < 5


# I8: batches that cannot be pickled


@pytest.mark.processes
@pytest.mark.parametrize(
    ("crime", "named"),
    [
        (crimes.return_lambda, "lambda"),
        (crimes.return_lock, "lock"),
        (crimes.return_non_leaf, "non-leaf|requires_grad|requires grad"),
    ],
)
def test_i8_a_batch_that_cannot_be_pickled_raises_at_once_and_names_the_reason(
    crime: Crime, named: str
) -> None:
    start = time.monotonic()
    loader = DataLoader(CrimeAt(crime, at=5), batch_size=2, num_workers=2, collate_fn=list, timeout=10)
    found = outcomes(loader)
    assert time.monotonic() - start < 5
    assert [found[:2], found[3:]] == [PAIRS[:2], PAIRS[3:]]
    assert isinstance(found[2], Exception)
    assert re.search(named, text_of(found[2]))


# P2: workers that die

DEATHS = [
    # the crime, torch's words for it, and ours
    (crimes.kill_itself, r"is killed by signal: Killed\. ", "SIGKILL"),
    (crimes.segfault, r"is killed by signal: Segmentation fault\. ", "SIGSEGV"),
    (
        crimes.exit_with_7,
        r"exited unexpectedly with exit code 7\. Details are lost due to multiprocessing\. "
        r"Rerunning with num_workers=0 may give better error trace\.",
        r"\b7\b",
    ),
]
DEATH_NAMES = [crime.__name__ for crime, _, _ in DEATHS]


def death(crime: Crime) -> tuple[list[Any], RuntimeError, set[int]]:
    """The batches before a death in batch 2 (indices 4 and 5), the error, and the workers' process ids.

    Checked here: the error comes within a second of the death.
    """
    loader = DataLoader(CrimeAt(crime, at=4, delay=0.3), batch_size=2, num_workers=2)
    iterator = iter(loader)
    pids = set(descendants())
    before = [next(iterator).tolist() for _ in range(2)]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        next(iterator)
    assert time.monotonic() - start < 1.3
    return before, caught.value, pids


@pytest.mark.processes
@pytest.mark.parametrize(("crime", "torchs_text", "_how"), DEATHS, ids=DEATH_NAMES)
def test_p2_a_workers_death_is_an_error_with_torchs_text(crime: Crime, torchs_text: str, _how: str) -> None:
    before, error, pids = death(crime)
    assert before == PAIRS[:2]
    found = re.search(r"DataLoader worker \(pid (\d+)\) " + torchs_text, str(error.__cause__))
    assert found is not None, str(error.__cause__)
    assert int(found[1]) in pids


@pytest.mark.processes
@pytest.mark.parametrize(("crime", "_torchs_text", "how"), DEATHS, ids=DEATH_NAMES)
def test_p2_a_workers_death_is_told_in_full(crime: Crime, _torchs_text: str, how: str) -> None:
    _, error, pids = death(crime)
    text = str(error)
    assert {int(pid) for pid in re.findall(r"pid\D{0,4}(\d+)", text)} & pids
    assert re.search(how, text)
    assert re.search(r"worker 0\b", text)
    assert re.search(r"batch 2\b", text)
    assert re.search(r"indices\D*\b4\b\D+\b5\b", text)


@pytest.mark.processes
def test_p2_a_silent_exit_is_a_death_too() -> None:
    death(crimes.exit_with_0)


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_p2_a_death_ends_the_iterator_and_the_loader_starts_anew(persistent: bool) -> None:
    # The delay lets the worker's answer to batch 0 leave its process before that dies.
    dataset = CrimeAt(crimes.kill_itself, at=4, delay=0.3)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == PAIRS[:2]
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(iterator)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
        assert wait_until(lambda: not descendants(), 3)
    loader.close()


@pytest.mark.processes
def test_p2_a_persistent_worker_killed_between_epochs_is_noticed_and_replaced() -> None:
    with DataLoader(range(12), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        assert outcomes(loader) == PAIRS
        victim = min(descendants())
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: victim not in descendants() or descendants()[victim].zombie, 3)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
            list(loader)
        assert time.monotonic() - start < 1.5
        assert outcomes(loader) == PAIRS
        assert victim not in descendants()


# P7: workers that cannot start

# The two seconds are for the error, not for an interpreter that starts and imports torch.
FORK: dict[str, Any] = {"multiprocessing_context": "fork"}


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_p7_a_failing_init_function_surfaces_once(workers: int, persistent: bool) -> None:
    start = time.monotonic()
    loader = DataLoader(
        range(12),
        batch_size=2,
        num_workers=workers,
        worker_init_fn=crimes.init_raises,
        persistent_workers=persistent,
        **FORK,
    )
    found = outcomes(loader)
    assert time.monotonic() - start < 2
    assert kinds(found) == [ValueError]
    assert re.fullmatch(r"worker \d cannot start", str(found[0]))
    assert "init_raises" in str(found[0].__cause__)
    assert re.search(r"DataLoader worker process \d", str(found[0].__cause__))
    loader.close()


@pytest.mark.processes
def test_p7_one_worker_whose_init_function_fails() -> None:
    start = time.monotonic()
    found = outcomes(
        DataLoader(
            range(12), batch_size=2, num_workers=2, worker_init_fn=crimes.init_raises_in_worker_1, **FORK
        )
    )
    assert time.monotonic() - start < 2
    errors = [outcome for outcome in found if isinstance(outcome, Exception)]
    assert kinds(errors) == [ValueError]
    assert str(errors[0]) == "worker 1 cannot start"
    assert "DataLoader worker process 1" in str(errors[0].__cause__)


@pytest.mark.processes
def test_p7_an_init_function_that_exits() -> None:
    start = time.monotonic()
    loader = DataLoader(range(12), batch_size=2, num_workers=2, worker_init_fn=crimes.init_exits, **FORK)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(loader)
    assert time.monotonic() - start < 2
    assert "exit code 5" in text_of(caught.value)


@pytest.mark.processes
def test_p7_a_stream_that_fails_before_its_first_sample() -> None:
    start = time.monotonic()
    found = outcomes(DataLoader(CrimeInIter(), batch_size=2, num_workers=2, **FORK))
    assert time.monotonic() - start < 2
    assert kinds(found) == [ValueError]
    assert "no stream to read" in str(found[0])


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_p7_a_dataset_that_cannot_be_unpickled(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    found = outcomes(DataLoader(FailsToUnpickle(), num_workers=2, multiprocessing_context=method))
    assert time.monotonic() - start < 20  # two interpreters import torch meanwhile
    assert kinds(found) == [ValueError]
    assert str(found[0]) == "this dataset does not survive the journey"
    assert "__setstate__" in str(found[0].__cause__)
    assert "Traceback" not in capfd.readouterr().err, "it belongs into the error, not on the terminal"


# P6b, P13: what cannot be sent to a worker

CANNOT_BE_PICKLED = (TypeError, AttributeError, pickle.PicklingError)


@pytest.mark.processes
def test_p6b_a_dataset_that_cannot_be_pickled_warns_and_raises() -> None:
    loader = DataLoader(HoldsUnpicklable(), num_workers=2, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="Got pickle error when"), pytest.raises(CANNOT_BE_PICKLED):
        iter(loader)


def unsendable(argument: str) -> dict[str, Any]:
    return {"dataset": Rows(4), argument: lambda x: x}


@pytest.mark.processes
@pytest.mark.parametrize("argument", ["collate_fn", "worker_init_fn"])
def test_p6b_a_function_that_cannot_be_pickled_warns_and_raises(argument: str) -> None:
    loader = DataLoader(**unsendable(argument), num_workers=2, multiprocessing_context="spawn")
    with pytest.warns(UserWarning, match="Got pickle error when"), pytest.raises(CANNOT_BE_PICKLED):
        iter(loader)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Got pickle error when")
@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"dataset": HoldsUnpicklable()}, ["dataset", "archive", "cursor"]),
        (unsendable("collate_fn"), ["collate_fn"]),
        (unsendable("worker_init_fn"), ["worker_init_fn"]),
        (
            {"dataset": Rows(4), "collate_fn": functools.partial(max, HoldsUnpicklable())},
            ["collate_fn", "archive", "cursor"],
        ),
    ],
    ids=["dataset", "collate_fn", "worker_init_fn", "partial"],
)
def test_p13_the_error_names_the_attribute_that_cannot_be_pickled(
    arguments: dict[str, Any], path: list[str]
) -> None:
    loader = DataLoader(**arguments, num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(CANNOT_BE_PICKLED) as caught:
        iter(loader)
    text = text_of(caught.value)
    assert [name for name in path if name not in text] == []


# P12: workers that are slow


@pytest.mark.processes
def test_p12_a_timeout_says_so_in_torchs_words() -> None:
    loader = DataLoader(CrimeAt(crimes.dawdle, at=4), batch_size=2, num_workers=2, timeout=1)
    found = outcomes(loader, limit=4)
    assert found[:2] == PAIRS[:2]
    for error in found[2:]:
        assert isinstance(error, RuntimeError)
        assert "DataLoader timed out after 1 seconds" in str(error)


@pytest.mark.processes
@pytest.mark.parametrize("crime", [crimes.dawdle, crimes.ignore_sigterm_and_hang])
def test_p12_a_timeout_shows_where_the_slow_worker_is(crime: Callable[[int], None]) -> None:
    loader = DataLoader(CrimeAt(crime, at=4), batch_size=2, num_workers=2, timeout=0.7)
    found = outcomes(loader, limit=3)
    loader.close()
    assert "timed out after 0.7 seconds" in str(found[2])
    text = text_of(found[2])
    assert crime.__name__ in text
    assert re.search(r"worker 0\b", text)
    assert re.search(r"indices\D*\b4\b\D+\b5\b", text)


# E: the index in an error's text


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ([3, 4, 5, 6, 7], "3..7"),
        ([0, 7, 3, 5, 1 << 60], "0, 7, … 1152921504606846976, 5 in all"),  # no list of all between them
        ([1, 2], "[1, 2]"),
    ],
)
def test_an_index_is_described_briefly(index: list[int], text: str) -> None:
    assert describe_index(index) == text
