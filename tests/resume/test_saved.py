"""What `load_state_dict()` refuses: it names the field, and changes nothing."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler
from torch.utils.data.datapipes.iter import IterableWrapper

from fastq_loader import DataLoader, PermutationSampler
from fastq_loader.reading import generators
from tests.support.datasets import MapDataset, Stream


def loader(length: int = 20, batch_size: int = 4, seed: int = 0, **keywords: Any) -> DataLoader[Any]:
    keywords = {"shuffle": True, "generator": torch.Generator().manual_seed(seed), **keywords}
    return DataLoader(MapDataset("tensors", length), batch_size, **keywords)


def state(of: DataLoader[Any] | None = None) -> dict[str, Any]:
    of = loader() if of is None else of  # a loader of a stream has no length to be true by
    next(iter(of))
    return of.state_dict()


def changed(*path: str, to: Any = None, drop: bool = False) -> Callable[[], Any]:
    def change() -> Any:
        whole = part = copy.deepcopy(state())
        for key in path[:-1]:
            part = part[key]
        if drop:
            del part[path[-1]]
        else:
            part[path[-1]] = to
        return whole

    return change


DAMAGED: dict[str, tuple[Callable[[], Any], str]] = {
    "no dict": (lambda: [state()], "the state is a list"),
    "foreign": (lambda: {"model": 1}, "'library'"),
    "torchdata's": (lambda: {"_snapshot": {}, "_iterator_finished": False}, "torchdata's StatefulDataLoader"),
    "of a later version": (changed("version", to=3), "field 'version' is 3, and this release reads 2"),
    "without a field": (changed("base_seed", drop=True), "field 'base_seed' is missing"),
    "a part of another type": (changed("order", "starts", to="two"), "field 'order.starts' is 'two'"),
    "not from zero": (changed("version", to=True), "field 'version' is True"),
    "begun too often": (changed("order", "starts", to=3), "field 'order.starts' is 3; .* from 1 to 2"),
    "a seed that is too large": (changed("base_seed", to=2**63), "field 'base_seed' is 9223372036854775808"),
    "more than was drawn": (changed("_sampler_iter_yielded", to=9), "field '_sampler_iter_yielded' is 9"),
    "positions that were not drawn": (changed("beyond", to=[7]), "field 'beyond' is .7."),
    "without a generator": (
        changed("generators", "generator", drop=True),
        "generators.generator' is missing",
    ),
    "without its start": (changed("order", "states", to={}), "'order.states.generator' is missing"),
    "positions that are none": (changed("beyond", to=[2.5]), "field 'beyond' is .2.5"),
    "a worker that is none": (changed("workers", to=[3]), "field 'workers.0' is 3"),
    "a digest that is none": (changed("order", "digest", to=["3", 5]), "field 'order.digest' is .'3', 5"),
    "no digest": (changed("order", "digest", drop=True), "field 'order.digest' is missing"),
    "attributes that are none": (changed("order", "attributes", to=[]), "field 'order.attributes' is"),
    "an attribute alone": (
        changed("order", "attributes", to={"0.n": 1}),
        "field 'order.attributes.0.n' is 1",
    ),
    "a state cut short": (
        changed("order", "states", to={"generator": '{"torch": "AAAA"}'}),
        "field 'order.states.generator' does not fit the generator",
    ),
    "a state of another kind": (
        changed(
            "generators", to={"generator": generators.dump(generators.state_of(generators.GLOBAL["random"]))}
        ),
        "field 'generators.generator' does not fit the generator",
    ),
    "a state that is none": (changed("generators", to={"generator": 3}), "generators.generator' is damaged"),
}


@pytest.mark.parametrize(("make", "text"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_wrong_with_a_state_is_named_and_nothing_is_taken(make: Any, text: str) -> None:
    other = loader(seed=3)
    before = generators.state_of(other.generator)
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(make())
    assert generators.same(before, generators.state_of(other.generator))
    assert other.position == (0, 0, 0)
    assert len(list(other)) == 5


OTHERS: dict[str, tuple[DataLoader[Any], Any, Any]] = {
    "dataset_length": (loader(length=21), 20, 21),
    "batch_size": (loader(batch_size=5), 4, 5),
    "sampler": (loader(shuffle=False), "BatchSampler/RandomSampler", "BatchSampler/SequentialSampler"),
    "schedule": (loader(schedule="dynamic"), "round_robin", "dynamic"),
    "generator": (loader(generator=None), "generator", ""),
    "replacement": (
        loader(shuffle=None, sampler=RandomSampler(range(20), replacement=True)),  # type: ignore[arg-type]
        False,
        True,
    ),
}


@pytest.mark.parametrize(("field", "other"), [(name, other) for name, (other, *_) in OTHERS.items()])
def test_a_loader_that_iterates_something_else_is_refused_unless_told(field: str, other: Any) -> None:
    _, saved, now = OTHERS[field]
    with pytest.raises(ValueError, match=f"field '{field}': {saved!r} was saved, and the loader has {now!r}"):
        other.load_state_dict(state())
    other.load_state_dict(state(), ignore=(field,))
    assert other.position == (0, 1, 1)


def test_samplers_with_another_order_are_refused_and_those_of_another_rank_are_not() -> None:
    items: Any = range(20)
    kinds: list[tuple[str, Callable[[int], Any], tuple[int, int]]] = [
        ("seed", lambda seed: PermutationSampler(20, seed), (1, 2)),
        ("num_replicas", lambda count: DistributedSampler(items, count, 0), (2, 4)),
        ("", lambda rank: DistributedSampler(items, 2, rank), (0, 1)),
    ]
    for field, make, values in kinds:
        one, other = (loader(shuffle=None, sampler=make(value)) for value in values)
        if field:
            with pytest.raises(ValueError, match=f"field '{field}'"):
                other.load_state_dict(state(one))
        else:
            other.load_state_dict(state(one))
            assert other.position == (0, 1, 1)


def test_names_to_ignore_are_checked() -> None:
    with pytest.raises(
        ValueError,
        match=r"ignore=\('length',\) is not possible here: use some of dataset_kind",
    ):
        loader().load_state_dict(state(), ignore=("length",))
    with pytest.raises(TypeError, match=r"ignore='batch_size' must be a collection of names"):
        loader().load_state_dict(state(), ignore="batch_size")


class Says(Stream):
    """Says where it stands."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Reshards(Says):
    def reshard_state_dicts(self, states: list[Any], num_workers: int) -> list[Any]:
        return [{"dataset": states[0]["dataset"], "ended": False}] * num_workers


def test_an_iterable_dataset_goes_on_with_as_many_workers_or_says_how_with_others() -> None:
    told = state(DataLoader(Says("tensors", (5,)), 2))
    told["num_workers"], told["workers"] = 2, told["workers"] * 2
    with pytest.raises(ValueError, match="field 'num_workers': 2 was saved, and the loader has 0"):
        DataLoader(Says("tensors", (5,)), 2).load_state_dict(told)
    dataset = Reshards("tensors", (5,))
    resharded = DataLoader(dataset, 2)
    resharded.load_state_dict(told)
    assert len(list(resharded)) == 3
    assert dataset.loaded == {"at": 3}
    assert resharded.position == (1, 0, 4)


@pytest.mark.parametrize("name", ["position", "ended", "dataset"])
def test_a_stream_that_says_where_it_stands_is_not_begun_anew(name: str) -> None:
    told = state(DataLoader(Says("tensors", (5,)), 2))
    worker = told["workers"][0]
    del (worker if name == "position" else worker["position"])[name]
    with pytest.raises(
        ValueError, match=rf"field 'workers\.0\.position.*{name}' is missing|0.position' is missing"
    ):
        DataLoader(Says("tensors", (5,)), 2).load_state_dict(told)


class Counts(Sampler[int]):
    """Says what it was told."""

    told: Any = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["told"]
        self.told += 0


@pytest.mark.parametrize("sampler_state", [None, {}, {"told": "x"}])
def test_what_a_sampler_refuses_is_named_and_nothing_is_taken(sampler_state: Any) -> None:
    sampler = Counts()
    one = loader(shuffle=None, sampler=sampler)
    before = generators.state_of(one.generator)
    told = loader(shuffle=None, sampler=Counts(), seed=4).state_dict()
    if sampler_state is None:
        del told["_index_sampler_state"]
    else:
        told["_index_sampler_state"] = sampler_state
    with pytest.raises(ValueError, match="field '_index_sampler_state'"):
        one.load_state_dict(told)
    assert generators.same(before, generators.state_of(one.generator))
    assert sampler.told == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_from_what_was_loaded_too(copied: Callable[[Any], Any]) -> None:
    one = loader()
    told = state(one)
    one.load_state_dict(told)
    twin = copied(one)
    assert twin.position == (0, 1, 1)
    rest = [batch[0].tolist() for batch in one]
    assert copied(one).position == (0, 0, 0)
    one.load_state_dict(told)
    again = copied(one)
    assert [batch[0].tolist() for batch in again] == rest
    assert one.position == (0, 1, 1)


def test_a_shuffling_pipe_goes_on_in_its_order() -> None:
    def pipe() -> DataLoader[Any]:
        return DataLoader(IterableWrapper(range(20)).shuffle(), 4, shuffle=True)  # type: ignore[no-untyped-call]

    first = pipe()
    iterator = iter(first)
    next(iterator)
    second = pipe()
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="1 batches that were handed out before are read again"):
        rest = [batch.tolist() for batch in second]
    assert rest == [batch.tolist() for batch in iterator]


def test_an_empty_state_is_a_loader_that_was_not_iterated() -> None:
    one = loader()
    one.load_state_dict(state())
    one.load_state_dict({})
    assert one.position == (0, 0, 0)
    assert len(list(one)) == 5


def test_what_was_loaded_is_what_would_be_saved() -> None:
    told = json.loads(json.dumps(state()))
    one = loader(seed=8)
    one.load_state_dict(told)
    assert one.state_dict() == told
    assert one.state_dict() is not told


def test_accelerate_may_count_back_and_say_that_the_epoch_is_over() -> None:
    one = loader()
    iterator = iter(one)
    batches = [next(iterator) for _ in range(3)]
    told = one.state_dict()
    told["_sampler_iter_yielded"] -= 1
    told["_num_yielded"] -= 1
    other = loader(seed=4)
    other.load_state_dict(told)
    assert torch.equal(next(iter(other))[0], batches[2][0])
    told["_iterator_finished"] = True
    other.load_state_dict(told)
    assert other.position == (1, 0, 2)
    assert len(list(other)) == 5
