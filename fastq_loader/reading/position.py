"""Where a dataset stands, in its own words: `state_dict` and `load_state_dict`, with torchdata's meaning.

Runs in workers; without workers in the consumer. An iterable dataset is asked, and its iterator; of an object
with indices only the dataset. (torchdata/stateful_dataloader/worker.py: `_make_state_dict`)
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol, TypeGuard

from fastq_loader.reading import seeding
from fastq_loader.reading.fetch import Fetcher, make_fetcher
from fastq_loader.system.interrupts import refuse_interrupt


class Stateful(Protocol):
    """It can say where it stands, and be put there."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def is_stateful(part: Any) -> TypeGuard[Stateful]:
    """Whether an object can say where it stands, and be put there."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def is_known(fetcher: Fetcher) -> bool:
    """Whether `of` has anything to say."""
    return is_stateful(fetcher.dataset) or is_stateful(fetcher.dataset_iter)


def of(fetcher: Fetcher) -> dict[str, Any]:
    """Where the dataset stands between two batches: "dataset" and "iterator", as far as they say it, and
    whether the iterator has "ended" with a batch that was not full."""
    iterator = fetcher.dataset_iter
    place: dict[str, Any] = {"ended": fetcher.ended}
    if is_stateful(iterator):
        place["iterator"] = iterator.state_dict()
    if iterator is not fetcher.dataset and is_stateful(fetcher.dataset):
        place["dataset"] = fetcher.dataset.state_dict()
    return place


def packed(fetcher: Fetcher, **more: Any) -> bytes:
    """The same as a pickle, with what else a reader says; b"": nothing. What user code raises stands in the
    place of its position: whoever only iterates a loader need not hear of it."""
    try:
        dataset, iterator = fetcher.dataset, fetcher.dataset_iter
        if not (more or hasattr(dataset, "state_dict") or hasattr(iterator, "state_dict")):
            return b""  # as for nearly every batch
        state = {"position": of(fetcher), **more} if is_known(fetcher) else more
        return pickle.dumps(state) if state else b""
    except Exception as error:
        refuse_interrupt(error)
        return pickle.dumps({"position": {"error": f"{type(error).__name__}: {error}"}, **more})


def fetcher_at(place: dict[str, Any] | None, dataset: Any, **rules: Any) -> Fetcher:
    """`make_fetcher(dataset, **rules)`, of a dataset that is put where it stood; None: nobody knows where."""
    if place is None:
        return make_fetcher(dataset, **rules)
    _set_dataset(dataset, place)  # before `iter(dataset)`
    fetcher = make_fetcher(dataset, **rules)
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
    if place.get("ended"):
        fetcher.ended = True
        # It is asked once more: datasets note in their iterator that they were put somewhere.
        with seeding.put_back():
            anew = next(fetcher.dataset_iter, fetcher) is not fetcher
        if anew:  # at its end it begins again
            _set_dataset(fetcher.dataset, place)
            if "iterator" in place:
                fetcher.dataset_iter.load_state_dict(place["iterator"])
