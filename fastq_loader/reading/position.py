"""Where a dataset stands, in its own words: `state_dict` and `load_state_dict`, with torchdata's meaning.

Runs in workers; without workers in the consumer. An iterable dataset is asked, and its iterator; of an object
with indices only the dataset. (torchdata/stateful_dataloader/worker.py: `_make_state_dict`)
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol, TypeGuard

from fastq_loader.reading import generators
from fastq_loader.reading.fetch import Fetcher
from fastq_loader.reading.tolerance import make_fetcher
from fastq_loader.system.attributes import attribute
from fastq_loader.system.interrupts import refuse_interrupt


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


def packed(fetcher: Fetcher, **more: Any) -> bytes:
    """A pickle of where the dataset stands between two batches, and of what else a reader says; b"": nothing.

    The "position" has "dataset" and "iterator", as far as they say it, and whether the iterator has "ended"
    with a batch that was not full. What user code raises takes its place: it does not concern a loader that
    is only iterated.
    """
    try:
        state = dict(more)
        if is_known(fetcher):
            dataset, iterator = fetcher.dataset, fetcher.dataset_iter
            state["position"] = place = {"ended": fetcher.ended}
            if is_stateful(iterator):
                place["iterator"] = iterator.state_dict()
            if iterator is not dataset and is_stateful(dataset):
                place["dataset"] = dataset.state_dict()
        return pickle.dumps(state) if state else b""
    except Exception as error:
        refuse_interrupt(error)
        return pickle.dumps({"position": {"error": f"{type(error).__name__}: {error}"}, **more})


def fetcher_at(place: dict[str, Any] | None, dataset: Any, **rules: Any) -> Fetcher:
    """`make_fetcher(dataset, **rules)`, of a dataset that is put where it stood; None: that is not known."""
    place = place or {}
    _set_dataset(dataset, place)  # before `iter(dataset)`
    fetcher = make_fetcher(dataset, **rules)
    _set_iterator(fetcher, place)
    if place.get("ended"):
        fetcher.ended = True
        # It is asked once more: datasets note in their iterator that they were put somewhere.
        with generators.put_back():
            begins_anew = next(fetcher.dataset_iter, fetcher) is not fetcher
        if begins_anew:
            _set_dataset(dataset, place)
            _set_iterator(fetcher, place)
    return fetcher


def put_at_end(place: dict[str, Any], dataset: Any, **rules: Any) -> None:
    """Put a dataset where it stood when an iteration of it was over: the next one begins from there."""
    fetcher_at({**place, "ended": True}, dataset, **rules)


def _set_dataset(dataset: Any, place: dict[str, Any]) -> None:
    if "dataset" in place:
        dataset.load_state_dict(place["dataset"])


def _set_iterator(fetcher: Fetcher, place: dict[str, Any]) -> None:
    if "iterator" in place:
        fetcher.dataset_iter.load_state_dict(place["iterator"])
