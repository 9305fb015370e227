"""Where a dataset or a sampler stands, in its own words: `state_dict` and `load_state_dict`, with torchdata's
meaning.

Runs in workers, and in the consumer: for samplers, and without workers. An iterable dataset and a sampler are
asked, and their iterators; of an object with indices only the dataset.
(torchdata/stateful_dataloader/worker.py: `_make_state_dict`)
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeGuard, TypeVar

from fastq_loader.reading import generators
from fastq_loader.reading.fetch import Fetcher
from fastq_loader.reading.tolerance import make_fetcher
from fastq_loader.system.attributes import attribute
from fastq_loader.system.interrupts import refuse_interrupt

T = TypeVar("T")


class Stateful(Protocol):
    """It can say where it stands, and be put there."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def is_stateful(part: Any) -> TypeGuard[Stateful]:
    """Whether an object can say where it stands, and be put there."""
    return callable(attribute(part, "state_dict")) and callable(attribute(part, "load_state_dict"))


def is_known(fetcher: Fetcher) -> bool:
    """Whether the dataset or its iterator says where it stands."""
    if fetcher.stateful is None:
        fetcher.stateful = is_stateful(fetcher.dataset) or is_stateful(fetcher.dataset_iter)
    return fetcher.stateful


def place_of(part: Any, iterator: Any) -> dict[str, Any]:
    """Where a dataset or sampler and its iterator stand, as far as they say it. Raises what they raise."""
    place: dict[str, Any] = {}
    if is_stateful(iterator):
        place["iterator"] = iterator.state_dict()
    if iterator is not part and is_stateful(part):
        place["dataset"] = part.state_dict()
    return place


def packed(fetcher: Fetcher, **more: Any) -> bytes:
    """A pickle of where the dataset stands between two batches, and of what else a reader says; b"": nothing.

    The "position" is its place, and whether the iterator has "ended" with a batch that was not full. What
    user code raises takes its place: it does not concern a loader that is only iterated.
    """
    try:
        state = dict(more)
        if is_known(fetcher):
            state["position"] = {"ended": fetcher.ended, **place_of(fetcher.dataset, fetcher.dataset_iter)}
        return pickle.dumps(state) if state else b""
    except Exception as error:
        refuse_interrupt(error)
        return pickle.dumps({"position": {"error": f"{type(error).__name__}: {error}"}, **more})


def fetcher_at(place: dict[str, Any] | None, dataset: Any, **rules: Any) -> Fetcher:
    """`make_fetcher(dataset, **rules)`, of a dataset that is put where it stood; None: that is not known."""
    place = place or {}
    make = partial(make_fetcher, dataset, **rules)
    fetcher = begun_at(place, dataset, make, lambda made: made.dataset_iter)
    fetcher.ended = place.get("ended", False)
    return fetcher


def begun_at(place: dict[str, Any], part: Any, begin: Callable[[], T], iterator_of: Callable[[T], Any]) -> T:
    """Return what `begin` makes, an iterator over a dataset or sampler, with both put where they stood.

    A part that has "ended" is asked once more: it may note in its iterator that it was put somewhere, and
    would begin its next iteration there.
    """
    _set(part, place, "dataset")  # before it is iterated
    begun = begin()
    iterator = iterator_of(begun)
    _set(iterator, place, "iterator")
    if place.get("ended"):
        with generators.put_back():
            begins_anew = next(iterator, place) is not place
        if begins_anew:
            _set(part, place, "dataset")
            _set(iterator, place, "iterator")
    return begun


def _set(part: Any, place: dict[str, Any], name: str) -> None:
    if name in place:
        part.load_state_dict(copy.deepcopy(place[name]))
