"""What code outside of a DataLoader overrides, calls, reads, sets, deletes, pickles, patches or tests for.

One row for each hook of `DataLoader` and its two iterators (torch/utils/data/dataloader.py, torch 2.13).
A row is a function of the class that says what it saw, in plain values; it runs with torch's class and with
ours, and both must say the same. Where ours differs on purpose the row is in `ON_PURPOSE`, with what each of
the two says; the reasons are in the README.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing import get_context
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from fastq_loader import DataLoader
from fastq_loader.workers import stopping
from tests.conftest import torchs_segments_removed
from tests.support.datasets import identity
from tests.support.loaders import MANY_WORKERS, Wrapped, collector_off
from tests.support.thorough import is_thorough

Row = Callable[..., Any]
ROWS: dict[str, Row] = {}
STAY: dict[str, Any] = {"num_workers": 1 + is_thorough, "persistent_workers": True}
WORKERS: list[dict[str, Any]] = [{"num_workers": 0}, STAY, *([{"num_workers": 2}] if is_thorough else [])]


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


def plain(value: Any) -> Any:
    """Batches as lists and numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def attempt(call: Callable[[], Any]) -> Any:
    """What a call gives, or what it raises and says."""
    try:
        return plain(call())
    except Exception as error:
        return type(error).__name__, str(error)


def twice(loader: Any) -> Any:
    return list(loader), list(loader)


def each(kind: Any, call: Callable[..., Any] = twice, size: int = 10, **arguments: Any) -> list[Any]:
    """`call` on a loader over so many numbers, without workers, with those that stay, and with others."""
    seen = []
    for workers in WORKERS:
        loader = kind(**{"dataset": range(size), "batch_size": 2, **workers, **arguments})
        seen.append(plain(call(loader)))
        loader._iterator = None
    return seen


class Stream(IterableDataset[int]):
    """Two workers have four numbers each; says it has fewer."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(4)) if info is None else iter(range(4 * info.id, 4 * info.id + 4))

    def __len__(self) -> int:
        return 3


@contextmanager
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [
        f"{warning.category.__name__}: {warning.message}"
        for warning in caught
        if "use of fork()" not in str(warning.message)
    ]


@contextmanager
def unraisable() -> Iterator[None]:
    """What finalizers raise in here is nobody's concern."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = before


# ---- the class ----------------------------------------------------------------------------------------


@row
def the_class_and_its_instances(kind: Any) -> Any:
    class Mine(kind[int]):
        pass

    loader, empty = kind(range(3)), kind([])
    torchs = len(inspect.signature(TorchDataLoader.__init__).parameters)  # also those of later versions
    parameters = list(inspect.signature(kind.__init__).parameters.values())[:torchs]
    once = ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers", "timeout"]
    return {
        "parameters": [(p.name, p.kind, p.default) for p in parameters],
        "names": (kind.__name__, kind.__qualname__),
        "names that it lacks": [name for name in dir(TorchDataLoader) if not hasattr(kind, name)],
        "attributes that it lacks": [name for name in vars(TorchDataLoader([1])) if name not in vars(loader)],
        "subscripted": (plain(list(Mine(range(4), 2))), kind[int].__origin__ is kind),
        "classes": [isinstance(loader, each) for each in (TorchDataLoader, kind, Mine)],
        "a subclass": (issubclass(Mine, TorchDataLoader), isinstance(Mine(range(3)), kind)),
        "truth": (bool(empty), bool(loader)),
        "equality": (loader == loader, loader == kind(range(3)), len({loader, loader})),
        "kinds of datasets": [kind(dataset)._dataset_kind for dataset in (range(3), Stream())],
        "set once": [attempt(functools.partial(setattr, loader, name, 0)) for name in once],
    }


@row
def the_flag_that_says_it_is_initialized(kind: Any) -> Any:
    """timm's MultiEpochsDataLoader opens and closes it."""
    loader = kind(range(6), 2)
    before = loader._DataLoader__initialized
    loader._DataLoader__initialized = False
    loader.batch_sampler = BatchSampler(range(6), 3, False)
    loader._DataLoader__initialized = True
    return before, plain(list(loader)), attempt(lambda: setattr(loader, "batch_sampler", None))


@row
def any_other_attribute(kind: Any) -> Any:
    loader = kind(range(6), 2)
    loader.mine = [1]
    del loader.generator
    return loader.mine, hasattr(loader, "generator"), attempt(lambda: delattr(loader, "nothing"))


@row
def arguments_set_past_the_constructor_before_and_between_epochs(kind: Any) -> Any:
    """Workers that stay were started with what was set then; the others follow."""

    def run(loader: Any) -> Any:
        seen = []
        for size, collate in ((5, identity), (4, sum)):
            object.__setattr__(loader, "batch_sampler", BatchSampler(range(size), size, False))
            object.__setattr__(loader, "dataset", range(100 * size, 100 * size + 10))
            loader.collate_fn = collate
            seen.append((twice(loader), len(loader)))
        return seen

    return each(kind, run)


@row
def the_number_of_workers_set_later(kind: Any) -> Any:
    loader = kind(range(6), 2)
    seen = []
    with unraisable():  # torch's iterators, half made
        for workers, prefetch in ((2, None), (2, 2), (2, 0), (-1, 2)):
            loader.num_workers, loader.prefetch_factor = workers, prefetch
            found = attempt(lambda: list(loader))
            seen.append(found if isinstance(found, list) else found[0])
    return seen


@row
def the_context_is_a_property(kind: Any) -> Any:
    loader = kind(range(6), 2, num_workers=1)
    empty = loader.multiprocessing_context
    loader.multiprocessing_context = "fork"
    name = loader.multiprocessing_context.get_start_method()
    return (
        empty,
        name,
        "multiprocessing_context" in vars(loader),
        isinstance(inspect.getattr_static(loader, "multiprocessing_context"), property),
        attempt(lambda: setattr(loader, "multiprocessing_context", "nonsense"))[0],
        attempt(lambda: setattr(loader, "multiprocessing_context", 3)),
        attempt(lambda: setattr(kind(range(6)), "multiprocessing_context", "fork")),
    )


@row
def methods_and_properties_may_be_overridden(kind: Any) -> Any:
    def generator(self: Any) -> Any:
        for batch in kind._get_iterator(self):
            yield batch + 1

    overrides: list[tuple[str, Any]] = [
        ("_index_sampler", property(lambda self: [[5, 6], [7]])),
        ("_auto_collation", property(lambda self: False)),
        ("multiprocessing_context", property(lambda self: get_context("fork"), lambda self, value: None)),
        ("dataset", property(lambda self: range(10, 20), lambda self, value: None)),
        ("__len__", lambda self: 2),
        ("__iter__", lambda self: map(plain, kind.__iter__(self))),
        ("_get_iterator", lambda self: itertools.chain(kind._get_iterator(self), ["end"])),
        ("_get_iterator", lambda self: iter("abc")),
        ("_get_iterator", generator),
    ]

    def run(loader: Any) -> Any:
        return attempt(lambda: twice(loader)), len(loader), attempt(lambda: len(iter(loader)))

    return [
        each(type("Mine", (kind,), {name: override}), run, collate_fn=torch.tensor)
        for name, override in overrides
    ]


@row
def the_length_of_a_stream_that_is_asked_for_between_epochs(kind: Any) -> Any:
    def run(loader: Any) -> Any:
        with warned() as texts:
            counts = [len(list(loader)), loader._IterableDataset_len_called, len(loader), len(list(loader))]
        return counts, loader._IterableDataset_len_called, [text.split(" at 0x")[0] for text in texts]

    return each(kind, run, dataset=Stream())


# ---- making iterators -----------------------------------------------------------------------------------


def wrapping(kind: Any) -> Any:
    class Mine(kind):
        made = 0

        def _get_iterator(self) -> Any:
            type(self).made += 1
            return Wrapped(super()._get_iterator(), lambda batch: batch * 10)

    return Mine


@row
def an_overridden_get_iterator_is_called_and_what_it_returns_is_kept_and_reset(kind: Any) -> Any:
    mine = wrapping(kind)

    def run(loader: Any) -> Any:
        mine.made, seen = 0, []
        for stop in (1, 3, 0, 9, 9):
            iterator = iter(loader)
            seen.append((list(itertools.islice(iterator, stop)), len(iterator), type(iterator).__name__))
            seen.append(loader._iterator is iterator)
            del iterator
        return seen, mine.made

    return each(mine, run)


@row
def get_iterator_called_by_hand(kind: Any) -> Any:
    """As wrappers do it: the same object goes on after a reset."""

    def run(loader: Any) -> Any:
        one, two = loader._get_iterator(), loader._get_iterator()
        seen: list[Any] = [next(one), list(two)]
        for first_iter in ((), (False,)):
            if loader.persistent_workers or not loader.num_workers:  # torch's other workers end with an epoch
                one._reset(loader, *first_iter)
                seen.append(list(one))
        return seen, loader._iterator

    return each(kind, run)


class Repeated:
    """timm's and ultralytics' sampler that never ends."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


@row
def one_iterator_for_all_epochs(kind: Any) -> Any:
    class Mine(kind):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.iterator)

    seen = []
    for workers in WORKERS:
        loader = Mine(range(5), 2, **workers)
        seen.append(plain([list(loader), list(loader), len(loader)]))
        loader.iterator = loader._iterator = None
    return seen


# ---- iterators ------------------------------------------------------------------------------------------


KINDS = (_BaseDataLoaderIter, _SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
READ = (
    *("_IterableDataset_len_called", "_auto_collation", "_base_seed", "_dataset_kind", "_drop_last"),
    *("_in_order", "_num_workers", "_num_yielded", "_persistent_workers", "_pg", "_pin_memory"),
    *("_pin_memory_device", "_prefetch_factor", "_profile_name", "_rank", "_shared_seed", "_shutdown"),
    *("_timeout", "_worker_init_fn", "_world_size"),
)


@row
def what_iterators_say_of_themselves(kind: Any) -> Any:
    def look(iterator: Any) -> Any:
        return [(name, str(getattr(iterator, name, "none"))) for name in READ]

    def run(loader: Any) -> Any:
        torch.manual_seed(3)
        before, iterator = loader._iterator, iter(loader)
        seen = [before, loader._iterator is iterator, iter(iterator) is iterator, len(iterator)]
        seen.append([isinstance(iterator, each) for each in KINDS])
        seen.append(iterator._dataset is loader.dataset and iterator._collate_fn is loader.collate_fn)
        seen += [iterator._next_data(), look(iterator)]  # a batch that is taken so does not count
        for _ in range(2):
            next(iterator)
            seen.append(look(iterator))
        list(iterator)
        seen += [look(iterator), attempt(lambda: next(iterator))]
        return seen, [again._num_yielded for again in [iter(loader)] for _ in again]

    def run_past_an_error(loader: Any) -> Any:  # which does not count
        iterator, seen = iter(loader), []
        for _ in range(3):
            with suppress(TypeError):
                next(iterator)
            seen.append(iterator._num_yielded)
        return seen

    return each(kind, run), each(kind, run_past_an_error, dataset=[0, 1, 2, "x", 4, 5])


@row
def indices_that_are_still_to_come_can_be_read_and_replaced(kind: Any) -> Any:
    def run(loader: Any) -> Any:
        iterator = iter(loader)
        seen = [next(iterator), next(iterator._sampler_iter), iterator._next_index(), list(iterator)]
        iterator = iter(loader)
        iterator._sampler_iter = iter([[0, 9], [9, 9]])
        return [*seen, list(iterator)]

    torch.manual_seed(1)
    return each(kind, run, size=20), each(kind, run, size=20, shuffle=True)


@row
def the_workers_of_an_iterator(kind: Any) -> Any:
    def look(iterator: Any) -> Any:
        workers = iterator._workers
        seen = [(type(one.pid), one.is_alive(), one.exitcode, one.daemon) for one in workers]
        return seen, len({one.pid for one in workers}), {one.name.rpartition("-")[0] for one in workers}

    iterator = iter(kind(range(6), 2, num_workers=2))
    seen = [look(iterator), look(iter(kind(range(6), 2, num_workers=2, multiprocessing_context="fork")))]
    list(iterator)
    stopping.wait()  # on a busy machine ours end in the background
    return [*seen, look(iterator)]


@row
def the_fetcher_of_an_iterator(kind: Any) -> Any:
    fetchers = [iter(kind(dataset, 2))._dataset_fetcher for dataset in (range(4), Stream())]
    seen = [(one.auto_collation, one.drop_last, plain(one.fetch([0, 1]))) for one in fetchers]
    return seen, fetchers[1].ended, fetchers[0].collate_fn is kind([]).collate_fn


@row
def iterators_cannot_be_pickled_or_copied(kind: Any) -> Any:
    def run(loader: Any) -> Any:
        iterator = iter(loader)
        acts: list[Any] = [pickle.dumps, copy.copy, copy.deepcopy]
        return [attempt(functools.partial(act, iterator))[0] for act in acts]

    return each(kind, run)


@row
def a_dropped_iterator_is_gone(kind: Any) -> Any:
    def run(loader: Any) -> Any:
        iterator = iter(loader)
        next(iterator)
        watched = weakref.ref(iterator)
        loader._iterator = None
        del iterator
        return watched()

    with collector_off():
        return each(kind, run)


@row
def the_profilers_name_for_a_batch(kind: Any) -> Any:
    names = []
    for workers in (0, 1):
        iterator = iter(kind(range(4), 2, num_workers=workers))
        with torch.autograd.profiler.profile() as profile:
            list(iterator)
        names.append({event.name for event in profile.function_events or () if "Loader" in event.name})
    return names


# ---- subclasses -----------------------------------------------------------------------------------------


T = TypeVar("T")


@row
def setattr_and_init_that_are_replaced_for_a_while(kind: Any) -> Any:
    """lightning.fabric.utilities.data._replace_dunder_methods, which records how loaders are made."""

    class Mine(kind):
        pass

    record: list[Any] = []

    def recording_init(self: Any, *arguments: Any, **keywords: Any) -> None:
        object.__setattr__(self, "inside", True)
        kind.__init__(self, *arguments, **keywords)
        object.__setattr__(self, "inside", False)
        record.append((len(arguments), sorted(keywords)))

    def recording_setattr(self: Any, name: str, value: Any) -> None:
        kind.__setattr__(self, name, value)
        if not self.inside:
            record.append(name)

    Mine.__init__, Mine.__setattr__ = recording_init, recording_setattr
    loader = Mine(range(6), 2, num_workers=2)
    loader.timeout = 3
    return plain(list(loader)), record


# ---- instances made in other ways -----------------------------------------------------------------------


@row
def an_instance_without_the_constructor(kind: Any) -> Any:
    bare = object.__new__(kind)
    names = ("dataset", "num_workers", "batch_sampler", "made_up")
    missing = [attempt(functools.partial(getattr, bare, name))[0] for name in names]
    bare.dataset = range(3)  # not refused yet
    return missing, isinstance(repr(bare), str), bare.dataset, bare._DataLoader__initialized


@row
def an_instance_that_sets_its_own_attributes(kind: Any) -> Any:
    """torchdata's StatefulDataLoader: the constructor's work is done by hand."""

    class Mine(kind):
        def __init__(self, dataset: Any, workers: int) -> None:
            self.num_workers = workers
            self.dataset = dataset
            self.prefetch_factor = 2 if workers else None
            self.pin_memory, self.pin_memory_device, self.timeout = False, "", 0
            self.worker_init_fn = self.generator = None
            self.multiprocessing_context = None
            self._dataset_kind = _DatasetKind.Map
            self.sampler = SequentialSampler(dataset)
            self.batch_sampler = BatchSampler(self.sampler, 2, False)
            self.batch_size, self.drop_last = 2, False
            self.collate_fn = identity
            self.persistent_workers = bool(workers)
            self.in_order = True
            self._IterableDataset_len_called = None
            self._iterator = None

    seen = []
    for workers in (0, 2):
        loader = Mine(range(4), workers)
        seen.append((list(loader), list(loader), len(loader)))
        loader._iterator = None
    return seen


@row
def copies_while_workers_stay(kind: Any) -> Any:
    loader = kind(range(4), 2, num_workers=1, persistent_workers=True)
    list(loader)
    try:
        made = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
        return [plain(list(one)) for one in made]
    except Exception as error:
        return type(error).__name__
    finally:
        loader._iterator = None
        gc.collect()


# ---- torch's names that are patched -----------------------------------------------------------------------


@row
def torchs_constructor_is_wrapped(kind: Any) -> Any:
    before, calls = TorchDataLoader.__init__, []

    def wrapped(self: Any, *arguments: Any, **keywords: Any) -> None:
        calls.append(len(arguments) > 0 or "dataset" in keywords)
        before(self, *arguments, **keywords)

    with patch.object(TorchDataLoader, "__init__", wrapped):
        return plain(list(kind(range(4), 2))), calls


@row
def names_that_iterators_lack(kind: Any) -> Any:
    """Also those of versions of torch to come: what they add is to be looked at."""

    def names(kind: Any, workers: int) -> set[str]:
        return set(dir(iter(kind(range(4), 2, num_workers=workers))))

    return [sorted(names(TorchDataLoader, workers) - names(kind, workers)) for workers in (0, 1)]


@row
def the_iterator_of_the_next_epoch_is_the_same_object(kind: Any) -> Any:
    """Ours is a new one, so that the old one can say that it has ended."""
    loader = kind(range(4), 2, num_workers=1, persistent_workers=True)
    one, two = iter(loader), iter(loader)
    loader._iterator = None
    return one is two


# ---- the test -------------------------------------------------------------------------------------------

QUEUES_AND_TASK_TABLES = [
    *("_data_queue", "_index_queues", "_rcvd_idx", "_send_idx", "_task_info", "_tasks_outstanding"),
    *("_worker_pids_set", "_worker_queue_idx_cycle", "_worker_result_queue", "_workers_done_event"),
    *("_workers_num_tasks", "_workers_status"),
]
if "_workers_num_tasks" not in inspect.getsource(_MultiProcessingDataLoaderIter):  # older releases
    QUEUES_AND_TASK_TABLES.remove("_workers_num_tasks")
#: What torch's class says, and what ours does.
ON_PURPOSE = {
    "copies_while_workers_stay": ("NotImplementedError", [[[0, 1], [2, 3]]] * 3),
    "names_that_iterators_lack": ([[], []], [[], QUEUES_AND_TASK_TABLES]),
    "the_iterator_of_the_next_epoch_is_the_same_object": (True, False),
}


@pytest.mark.processes
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.filterwarnings("ignore::fastq_loader.TorchWorkers")
@MANY_WORKERS
@pytest.mark.parametrize("name", ROWS)
def test_a_hook_is_torchs_or_differs_on_purpose(name: str) -> None:
    with torchs_segments_removed():
        torchs, ours = ROWS[name](TorchDataLoader), ROWS[name](DataLoader)
    assert torchs not in (None, [], ()), "the row says nothing"
    assert (torchs, ours) == ON_PURPOSE.get(name, (torchs, torchs))
