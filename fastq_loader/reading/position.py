"""The position of a dataset or a sampler, saved and restored by its own `state_dict` and `load_state_dict`,
with torchdata's meaning.

Runs in workers, and in the consumer: for samplers, and without workers. Of an iterable dataset and of a
sampler both the object and its iterator are saved, after each batch. A map-style dataset has no position: its
state is saved by `extras.resume.state`, if a state is requested.
(torchdata/stateful_dataloader/worker.py: `_make_state_dict`)
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import FunctionType, GeneratorType
from typing import Any, Protocol, TypeGuard, TypeVar

from fastq_loader.reading import generators
from fastq_loader.reading.fetch import Fetcher
from fastq_loader.system.attributes import attribute, own_dict

T = TypeVar("T")


class Stateful(Protocol):
    """An object that can save and restore its position."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def is_stateful(part: Any) -> TypeGuard[Stateful]:
    """Whether an object can save and restore its position."""
    if type(part) is GeneratorType:  # the usual iterator of a sampler, which has no methods of a user's
        return False
    return has_methods(part) and not _needs_arguments(part)


def has_methods(part: Any) -> bool:
    """Whether an object has both methods, whatever arguments they take."""
    return callable(attribute(part, "state_dict")) and callable(attribute(part, "load_state_dict"))


def _needs_arguments(part: Any) -> bool:
    """Whether `state_dict` cannot be called without arguments: it is another library's protocol."""
    method = attribute(part, "state_dict")
    if type(method) is not FunctionType:
        return False
    bound = method is not own_dict(part).get("state_dict")
    needed = method.__code__.co_argcount - len(method.__defaults__ or ()) - bound
    return needed > 0 or method.__code__.co_kwonlyargcount > len(method.__kwdefaults__ or ())


def is_known(fetcher: Fetcher) -> bool:
    """Whether an iterable dataset or its iterator can save its position."""
    if fetcher.stateful is None:
        parts = fetcher.dataset, fetcher.dataset_iter
        fetcher.stateful = fetcher.dataset_iter is not None and any(map(is_stateful, parts))
    return fetcher.stateful


def state_of(part: Any, iterator: Any) -> dict[str, Any]:
    """Positions of a dataset or sampler and its iterator, if stateful. Raises errors of `state_dict`."""
    state: dict[str, Any] = {}
    if is_stateful(iterator):
        state["iterator"] = iterator.state_dict()
    if iterator is not part and is_stateful(part):
        state["dataset"] = part.state_dict()
    return state


def packed(fetcher: Fetcher, **more: Any) -> bytes:
    """A pickle of the dataset's position between two batches, and of a reader's other fields; b"" if empty.

    The "position" includes whether the iterator has "ended" with a batch that was not full. An error of user
    code is recorded in its place: it must not fail a loader that is only iterated. A state that cannot be
    copied is left out.
    """
    if not is_known(fetcher):
        return pickle.dumps(more) if more else b""
    try:
        state = {"ended": fetcher.ended, **state_of(fetcher.dataset, fetcher.dataset_iter)}
    except Exception as error:
        return pickle.dumps({"position": {"error": f"{type(error).__name__}: {error}"}, **more})
    try:
        return pickle.dumps({"position": state, **more})
    except Exception as error:
        return pickle.dumps({"left_out": f"{type(error).__name__}: {error}", **more})


def fetcher_at(state: dict[str, Any], dataset: Any, make: Callable[[], Fetcher]) -> Fetcher:
    """The result of `make`, a fetcher of the dataset, which is restored to `state`."""
    fetcher = begun_at(state, dataset, make, lambda made: made.dataset_iter)
    fetcher.ended = state.get("ended", False)
    return fetcher


def begun_at(state: dict[str, Any], part: Any, begin: Callable[[], T], iterator_of: Callable[[T], Any]) -> T:
    """Return the result of `begin`, an iterator over a dataset or sampler, with both restored to `state`.

    An iterator that has "ended" is advanced once more: it may remember that it was restored, and would begin
    the next iteration at that position.
    """
    _set(part, state, "dataset")  # before it is iterated
    begun = begin()
    iterator = iterator_of(begun)
    _set(iterator, state, "iterator")
    if state.get("ended"):
        with generators.restored():
            begins_anew = next(iterator, state) is not state
        if begins_anew:
            _set(part, state, "dataset")
            _set(iterator, state, "iterator")
    return begun


def _set(part: Any, state: dict[str, Any], name: str) -> None:
    if name in state:
        part.load_state_dict(copy.deepcopy(state[name]))
