"""Rows I1 to I5, I9 and I10: what an iterator owns, what ends it, and what the loader accepts."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, SequentialSampler

import fastq_loader
from fastq_loader import DataLoader, errors, statistics
from tests.conftest import descendants, open_descriptors, wait_until
from tests.support.crimes import CrimeAt, Rows, Slow, dawdle, ignore_sigterm_and_hang


def numbers(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


EIGHT = [[0, 1], [2, 3], [4, 5], [6, 7]]


# I1, I2: several iterators


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_i1_two_iterators_are_independent(workers: int) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=workers)
    first, second = iter(loader), iter(loader)
    assert first is not second
    assert next(first).tolist() == [0, 1]
    assert next(first).tolist() == [2, 3]
    assert numbers(second) == EIGHT
    assert numbers(first) == EIGHT[2:]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_i1_zip_of_a_loader_with_itself_sees_everything_twice(workers: int) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=workers)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [(b, b) for b in EIGHT]


@pytest.mark.processes
def test_i2_nested_loops_over_a_persistent_loader_never_lose_batches_silently() -> None:
    seen: list[tuple[int, int]] = []
    with DataLoader(range(3), num_workers=2, persistent_workers=True) as loader:
        try:
            seen.extend((outer.item(), inner.item()) for outer in loader for inner in loader)
        except RuntimeError:
            return
    assert seen == [(outer, inner) for outer in range(3) for inner in range(3)]


@pytest.mark.processes
def test_i2_a_second_iteration_of_a_persistent_loader_ends_the_first_with_an_error() -> None:
    with DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        first = iter(loader)
        assert next(first).tolist() == [0, 1]
        second = iter(loader)
        assert next(second).tolist() == [0, 1]
        with pytest.raises(RuntimeError):
            next(first)
        assert numbers(second) == EIGHT[1:]
        assert numbers(loader) == EIGHT


# I3, I4: iterators that are left


def proportional_memory() -> int:
    """Bytes held by this process and its workers; a shared page counts once over all."""
    total = 0
    for pid in (os.getpid(), *descendants()):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


@pytest.mark.processes
def test_i3_a_thousand_breaks_keep_nothing() -> None:
    # Batches of 400 kB: a thousand that stay would be 400 MB.
    with DataLoader(Rows(16, 50_000), batch_size=2, num_workers=2, persistent_workers=True) as loader:

        def break_at_once(times: int) -> None:
            for _ in range(times):
                for batch in loader:
                    assert batch[:, 0].tolist() == [0, 1]
                    assert batch[:, -1].tolist() == [0, 1]
                    break

        break_at_once(50)
        before = len(open_descriptors()), len(descendants())
        memory = proportional_memory()
        break_at_once(950)
        assert (len(open_descriptors()), len(descendants())) == before
        assert proportional_memory() - memory < 64_000_000
        assert [batch[:, 0].tolist() for batch in loader] == [[2 * i, 2 * i + 1] for i in range(8)]


@pytest.mark.processes
def test_i3_thirty_breaks_without_persistent_workers() -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=2)
    for _ in range(30):
        for batch in loader:
            assert batch.tolist() == [0, 1]
            break
    del batch
    assert wait_until(lambda: not descendants(), 3)


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_i3_iterators_that_are_never_advanced(persistent: bool) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=persistent)
    for _ in range(5):
        iter(loader)
    assert len(descendants()) <= 2
    assert numbers(loader) == EIGHT


@pytest.mark.processes
def test_i3_closing_a_generator_around_the_loader_ends_its_workers() -> None:
    def around() -> Iterator[torch.Tensor]:
        yield from DataLoader(range(8), batch_size=2, num_workers=2)

    generator = around()
    assert next(generator).tolist() == [0, 1]
    assert len(descendants()) == 2
    generator.close()
    assert wait_until(lambda: not descendants(), 3)


@pytest.mark.processes
def test_i3_an_exception_in_the_loop_ends_the_workers() -> None:
    def train() -> None:
        for _ in DataLoader(range(8), batch_size=2, num_workers=2):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    assert wait_until(lambda: not descendants(), 3)


@pytest.mark.processes
def test_i3_late_answers_of_an_abandoned_epoch_are_dropped() -> None:
    dataset = Slow(6, 0.2)
    with DataLoader(dataset, num_workers=1, prefetch_factor=2, persistent_workers=True) as loader:
        assert next(iter(loader)).tolist() == [0]  # sample 1 is being loaded now
        assert numbers(loader) == [[i] for i in range(6)]
        assert loader.statistics().stale_answers >= 1


@pytest.mark.processes
@pytest.mark.parametrize("crime", [dawdle, ignore_sigterm_and_hang])
def test_i3_close_ends_workers_that_hang(crime: Callable[[int], None]) -> None:
    loader = DataLoader(CrimeAt(crime, at=1), num_workers=2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0]
    assert wait_until(lambda: len(descendants()) == 2, 3)
    start = time.monotonic()
    loader.close()
    assert wait_until(lambda: not descendants(), 8)
    assert time.monotonic() - start < 8


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_i4_an_epoch_after_a_break_does_not_wait_for_the_old_prefetch(workers: int) -> None:
    dataset = Slow(40, 0.2)
    with DataLoader(dataset, num_workers=workers, prefetch_factor=8, persistent_workers=True) as loader:
        assert next(iter(loader)).tolist() == [0]
        start = time.monotonic()
        assert next(iter(loader)).tolist() == [0]
        assert time.monotonic() - start < 1


# I5: iterators that have ended


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_i5_an_exhausted_iterator_stays_exhausted(workers: int, persistent: bool) -> None:
    with DataLoader(range(8), batch_size=2, num_workers=workers, persistent_workers=persistent) as loader:
        iterator = iter(loader)
        assert numbers(iterator) == EIGHT
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        assert numbers(loader) == EIGHT


@pytest.mark.processes
def test_i5_iteration_goes_on_after_a_timeout() -> None:
    dataset = CrimeAt(abs, at=2, length=6, delay=2.5)
    loader = DataLoader(dataset, num_workers=2, timeout=1, multiprocessing_context="fork")
    iterator = iter(loader)
    assert [next(iterator).item() for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        next(iterator)
    time.sleep(2)
    assert [batch.item() for batch in iterator] == [2, 3, 4, 5]


# Ctrl-C inside next()


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_a_keyboard_interrupt_inside_next_leaves_a_loader_that_closes(persistent: bool) -> None:
    loader = DataLoader(Slow(4, 1.0), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert time.monotonic() - start < 0.95, "next() waited for the sample"
    timer.join()
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 6
    assert numbers(loader) == [[0], [1], [2], [3]]
    loader.close()


@pytest.mark.processes
def test_a_keyboard_interrupt_inside_next_loses_no_batch() -> None:
    iterator = iter(DataLoader(Slow(4, 0.6), num_workers=2))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    timer.join()
    assert numbers(iterator) == [[0], [1], [2], [3]]


# close(), with, repr(), statistics()


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_close_is_idempotent_and_the_loader_works_again(workers: int, persistent: bool) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=workers, persistent_workers=persistent)
    loader.close()
    for _ in range(2):
        assert numbers(loader) == EIGHT
        loader.close()
        loader.close()
        assert wait_until(lambda: not descendants(), 3)


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_cut_off_by_close_says_so(persistent: bool) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    loader.close()
    assert wait_until(lambda: not descendants(), 3)
    with pytest.raises(RuntimeError, match="close"):
        next(iterator)


@pytest.mark.processes
def test_the_end_of_a_with_block_ends_the_workers() -> None:
    with DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        assert numbers(loader) == EIGHT
        assert len(descendants()) == 2
    assert wait_until(lambda: not descendants(), 3)


@pytest.mark.processes
def test_repr_shows_the_state() -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True)
    idle = repr(loader)
    assert "DataLoader" in idle
    iterator = iter(loader)
    next(iterator)
    assert repr(loader) != idle
    loader.close()
    assert "DataLoader" in repr(loader)


@pytest.mark.processes
def test_statistics_is_a_snapshot() -> None:
    with DataLoader(Rows(8, 50_000), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        at_first = loader.statistics()
        for _ in range(2):
            for _batch in loader:
                pass
        del _batch
        after = loader.statistics()
        assert {worker.pid for worker in after.workers} == set(descendants())
    assert (at_first.epochs, at_first.batches, at_first.bytes) == (0, 0, 0)
    assert (after.epochs, after.batches) == (2, 8)
    assert after.bytes >= 8 * 2 * 50_000 * 4
    assert [worker.id for worker in after.workers] == [0, 1]
    assert sum(worker.batches for worker in after.workers) == 8
    assert all(worker.work_seconds > 0 and worker.idle_seconds >= 0 for worker in after.workers)
    assert after.wait_seconds > 0
    assert min(after.blocks_in_use, after.blocks_free, after.blocks_grown, after.stale_answers) >= 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.epochs = 3


# I9: what the loader accepts, in torch's words


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)

    def __len__(self) -> int:
        return 4

    def __repr__(self) -> str:
        return "Stream()"


MAP = Rows(4)
SAMPLER = SequentialSampler(MAP)

BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "negative workers": {"num_workers": -1},
    "workers of the wrong type": {"num_workers": "two"},
    "negative timeout": {"timeout": -1},
    "prefetch without workers": {"prefetch_factor": 2},
    "negative prefetch": {"num_workers": 1, "prefetch_factor": -1},
    "persistent without workers": {"persistent_workers": True},
    "context without workers": {"multiprocessing_context": "fork"},
    "unknown start method": {"num_workers": 1, "multiprocessing_context": "teleport"},
    "context of the wrong type": {"num_workers": 1, "multiprocessing_context": 3},
    "sampler and shuffle": {"sampler": SAMPLER, "shuffle": True},
    "batch sampler and batch size": {"batch_sampler": [[0]], "batch_size": 2},
    "batch sampler and shuffle": {"batch_sampler": [[0]], "shuffle": True},
    "batch sampler and sampler": {"batch_sampler": [[0]], "sampler": SAMPLER},
    "batch sampler and drop_last": {"batch_sampler": [[0]], "drop_last": True},
    "drop_last without batches": {"batch_size": None, "drop_last": True},
    "batch size 0": {"batch_size": 0},
    "negative batch size": {"batch_size": -3},
    "batch size of the wrong type": {"batch_size": "three"},
    "batch size True": {"batch_size": True},
    "drop_last of the wrong type": {"drop_last": "yes"},
    "shuffled stream": {"dataset": Stream(), "shuffle": True},
    "stream with a sampler": {"dataset": Stream(), "sampler": SAMPLER},
    "stream with a batch sampler": {"dataset": Stream(), "batch_sampler": [[0]]},
    "shuffled and empty": {"dataset": Rows(0), "shuffle": True},
    # Two mistakes at once: the first check decides.
    "workers before timeout": {"num_workers": -1, "timeout": -1},
    "timeout before prefetch": {"timeout": -1, "prefetch_factor": 2},
    "prefetch before persistent": {"prefetch_factor": 2, "persistent_workers": True},
    "persistent before context": {"persistent_workers": True, "multiprocessing_context": "fork"},
    "context before samplers": {"multiprocessing_context": "fork", "sampler": SAMPLER, "shuffle": True},
    "stream before batch size": {"dataset": Stream(), "shuffle": True, "batch_size": 0},
    "shuffle before batch sampler": {"sampler": SAMPLER, "shuffle": True, "batch_sampler": [[0]]},
}


def refusal(loader: Callable[..., Any], arguments: dict[str, Any]) -> tuple[type | None, str]:
    try:
        loader(**{"dataset": MAP, **arguments})
    except Exception as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.parametrize("mistake", BAD_ARGUMENTS)
def test_i9_bad_arguments_are_refused_in_torchs_words(mistake: str) -> None:
    arguments = BAD_ARGUMENTS[mistake]
    expected = refusal(TorchDataLoader, arguments)
    assert expected[0] is not None, "torch accepts this"
    assert refusal(DataLoader, arguments) == expected


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((), {"no_such_argument": 1}),
        ((1, None, None, None, 0, None, False, False, 0, None, None, None, 2), {}),
    ],
)
def test_i9_unknown_and_superfluous_arguments(positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="no_such_argument" if keywords else "positional"):
        DataLoader(MAP, *positional, **keywords)


def test_i9_prefetch_factor_0_with_workers_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="prefetch_factor"):
        DataLoader(MAP, num_workers=1, prefetch_factor=0)


def test_i9_a_timeout_without_workers_is_refused() -> None:
    with pytest.raises(AssertionError, match="timeout"):
        iter(DataLoader(MAP, timeout=1))


ATTRIBUTES = ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_i9_attributes_that_cannot_be_set_later(attribute: str) -> None:
    texts = []
    for loader in (TorchDataLoader(MAP), DataLoader(MAP)):
        value = getattr(loader, attribute)
        with pytest.raises(ValueError, match=attribute) as caught:
            setattr(loader, attribute, value)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_i9_attributes_that_can_be_set_later() -> None:
    loader = DataLoader(MAP)
    loader.num_workers = 2
    loader.collate_fn = list
    loader.worker_init_fn = print
    loader.timeout = 5
    loader.an_attribute_of_the_users = 1
    assert (loader.num_workers, loader.collate_fn, loader.timeout) == (2, list, 5)
    assert loader.an_attribute_of_the_users == 1


@pytest.mark.parametrize(
    ("attribute", "value", "kind", "text"),
    [
        ("schedule", "bogus", ValueError, "schedule='bogus' is unknown: use 'round_robin', 'dynamic', "),
        ("schedule", None, TypeError, "schedule=None is unknown"),
        ("workers", "threads", ValueError, "workers='threads' is unknown"),
        ("workers", 4, TypeError, "how many there are is num_workers"),
        ("device", "toaster", ValueError, "device='toaster' is unknown"),
    ],
)
def test_i9_arguments_beyond_torchs_are_checked_when_they_are_set_later(
    attribute: str, value: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        DataLoader(range(4), **{attribute: value})
    loader = DataLoader(range(4))
    before = getattr(loader, attribute)
    with pytest.raises(kind, match=re.escape(text)):
        setattr(loader, attribute, value)
    assert getattr(loader, attribute) == before
    object.__setattr__(loader, attribute, value)  # past the check, as frameworks may
    with pytest.raises(kind, match=re.escape(text)):
        iter(loader)


class ThreadContext(SpawnContext):
    """MONAI's `_ProcessThreadContext` (data/thread_buffer.py): its processes are threads."""

    Process = threading.Thread  # type: ignore[assignment]


def test_h5_a_context_whose_processes_are_threads_is_refused_at_construction() -> None:
    threads = threading.active_count()
    with pytest.raises(TypeError, match=r"multiprocessing_context=.* starts workers as threading.Thread"):
        DataLoader(range(4), num_workers=2, multiprocessing_context=ThreadContext())
    loader = DataLoader(range(4), num_workers=2)
    loader.multiprocessing_context = ThreadContext()
    with pytest.raises(TypeError, match="which is no process"):
        iter(loader)
    assert threading.active_count() == threads


def test_whatever_can_be_raised_or_warned_is_exported() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
    }
    assert kinds <= set(fastq_loader.__all__)
    assert fastq_loader.LateBatch in vars(statistics).values()


def test_i9b_the_class_can_be_subscripted() -> None:
    assert DataLoader[int](MAP, batch_size=2).batch_size == 2

    class Subclass(DataLoader[torch.Tensor]):
        pass

    assert isinstance(Subclass(MAP), TorchDataLoader)


class Growing(Dataset[int]):
    def __init__(self) -> None:
        self.items = list(range(5))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_i9b_len_follows_a_dataset_that_grows(workers: int) -> None:
    dataset = Growing()
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    assert len(loader) == 3
    dataset.items += [5, 6]
    assert len(loader) == 4
    assert numbers(loader) == [[0, 1], [2, 3], [4, 5], [6]]


def warnings_of(act: Callable[[], Any]) -> list[tuple[type[Warning], str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [(warning.category, str(warning.message)) for warning in caught]


def test_i9b_more_workers_than_cpus_warn_at_construction() -> None:
    workers = len(os.sched_getaffinity(0)) + 1
    expected = warnings_of(lambda: TorchDataLoader(MAP, num_workers=workers))
    assert len(expected) == 1
    assert warnings_of(lambda: DataLoader(MAP, num_workers=workers)) == expected


@pytest.mark.processes
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the warning is about having no accelerator")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", ["", "cuda"])
def test_i9b_pinning_without_an_accelerator_warns_and_works(workers: int, device: str) -> None:
    arguments: dict[str, Any] = {"pin_memory": True, "pin_memory_device": device, "num_workers": workers}
    batches: list[torch.Tensor] = []
    expected = warnings_of(lambda: list(TorchDataLoader(MAP, **arguments)))
    assert expected
    assert warnings_of(lambda: batches.extend(DataLoader(MAP, **arguments))) == expected
    assert [batch[0, 0].item() for batch in batches] == [0, 1, 2, 3]


# I10: what frameworks do to a loader


@pytest.mark.processes
def test_i10_iterator_none_shuts_persistent_workers_down() -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True)
    assert loader._iterator is None
    assert numbers(loader) == EIGHT
    assert loader._iterator is not None
    assert len(descendants()) == 2
    loader._iterator = None
    gc.collect()
    assert wait_until(lambda: not descendants(), 3)
    assert loader._iterator is None
    assert numbers(loader) == EIGHT


def by_pickle(loader: DataLoader[Any]) -> DataLoader[Any]:
    copied = pickle.loads(pickle.dumps(loader))
    assert isinstance(copied, DataLoader)
    return copied


@pytest.mark.processes
@pytest.mark.parametrize("duplicate", [by_pickle, copy.deepcopy])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_i10_an_idle_loader_pickles_and_deep_copies(
    duplicate: Callable[[DataLoader[Any]], DataLoader[Any]], used: bool, workers: int
) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=workers)
    if used:
        assert numbers(loader) == EIGHT
    copied = duplicate(loader)
    assert type(copied) is DataLoader
    assert copied.num_workers == workers
    with pytest.raises(ValueError, match="batch_size"):
        copied.batch_size = 3
    assert numbers(copied) == EIGHT
    assert numbers(loader) == EIGHT


@pytest.mark.processes
@pytest.mark.parametrize("duplicate", [by_pickle, copy.deepcopy])
def test_i10_a_closed_persistent_loader_pickles_and_deep_copies(
    duplicate: Callable[[DataLoader[Any]], DataLoader[Any]],
) -> None:
    loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True)
    assert numbers(loader) == EIGHT
    loader.close()
    with duplicate(loader) as copied:
        assert numbers(copied) == EIGHT
