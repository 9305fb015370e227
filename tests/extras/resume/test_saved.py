"""What `load_state_dict()` refuses: it names the field, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from fastq_loader import PermutationSampler, StatefulDataLoader, WeightedSampler
from fastq_loader.reading import generators
from tests.support.datasets import MapDataset, Stream


def loader(length: int = 20, batch_size: int = 4, seed: int = 0, **keywords: Any) -> StatefulDataLoader[Any]:
    keywords = {"shuffle": True, "generator": torch.Generator().manual_seed(seed), **keywords}
    return StatefulDataLoader(MapDataset("tensors", length), batch_size, **keywords)


def state(of: StatefulDataLoader[Any] | None = None) -> dict[str, Any]:
    of = loader() if of is None else of  # a loader of a stream has no length to be true by
    next(iter(of))
    return of.state_dict()


def changed(name: str, to: Any = None, drop: bool = False) -> Callable[[], Any]:
    def change() -> Any:
        whole = {**state(), name: to}
        if drop:
            del whole[name]
        return whole

    return change


def cut(of: dict[str, Any]) -> dict[str, Any]:
    """With another value in the text."""
    return {**of, "rest": of["rest"].replace('"epoch": 0', '"epoch": 1')}


DAMAGED: dict[str, tuple[Callable[[], Any], str]] = {
    "no dict": (lambda: [state()], "the state is a list"),
    "foreign": (lambda: {"model": 1}, "'library'.*its keys are 'model'.*anew, load {}"),
    "of a later version": (changed("version", to=6), "field 'version' is 6, and this release reads 5"),
    "by the earlier rule": (
        changed("version", to=4),
        "field 'version' is 4, .*reads 5: .*by another rule. Finish",
    ),
    "a version that is none": (changed("version", to=True), "field 'version' is True"),
    "without a field": (changed("seed", drop=True), "field 'seed' is missing"),
    "without the rest": (changed("rest", drop=True), "field 'rest' is missing"),
    "a rest that is none": (changed("rest", to=3), "field 'rest' is damaged"),
    "a rest that was changed": (lambda: cut(state()), "field 'rest' is damaged, or was changed"),
    "a checksum that is none": (changed("checksum", to="5"), "field 'rest' is damaged"),
    "more than was drawn": (changed("_sampler_iter_yielded", to=9), "field '_sampler_iter_yielded' is 9"),
    "less than nothing": (changed("_sampler_iter_yielded", to=-1), "field '_sampler_iter_yielded' is -1"),
    "batches that are none": (changed("_sampler_iter_yielded", to=0.5), "'_sampler_iter_yielded' is 0.5"),
    "more workers": (changed("workers", to=[3]), "field 'workers' is .3.; it should be a list of 0"),
    "no workers": (changed("workers", to=None), "field 'workers' is None"),
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


OTHERS: dict[str, tuple[StatefulDataLoader[Any], Any, Any]] = {
    "dataset_length": (loader(length=21), 20, 21),
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
    text = (
        f"field '{field}': {saved!r} was saved, and the loader has {now!r}.*epoch anew, load {{}}; with Acc"
    )
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state())
    other.load_state_dict(state(), ignore=(field,))
    assert other.position == (0, 1, 1)


def test_samplers_with_another_order_are_refused_and_those_of_another_rank_are_not() -> None:
    items: Any = range(20)
    kinds: list[tuple[str, Callable[[int], Any], tuple[int, int]]] = [
        ("seed", lambda seed: PermutationSampler(20, seed), (1, 2)),
        ("weights_checksum", lambda first: WeightedSampler([first, *range(1, 20)], 20), (1, 2)),
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


def samples(batches: Iterable[Any]) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


ORDERS: dict[str, Callable[[int, torch.Generator], dict[str, Any]]] = {
    "sequential": lambda size, _: {"batch_sampler": BatchSampler(SequentialSampler(range(50)), size, False)},
    "shuffle": lambda size, generator: {"batch_size": size, "shuffle": True, "generator": generator},
    "several shuffles": lambda size, generator: {
        "batch_size": size,
        "sampler": RandomSampler(range(50), num_samples=130, generator=generator),  # type: ignore[arg-type]
    },
    "permutation": lambda size, _: {"batch_size": size, "sampler": PermutationSampler(50, 3)},
    "distributed": lambda size, _: {
        "batch_size": size,
        "sampler": DistributedSampler(range(50), 2, 0),  # type: ignore[arg-type]
    },
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_another_batch_size_goes_on_after_the_samples_that_were_delivered(order: Any) -> None:
    """Also where a framework makes a batch sampler; and once more; and the next epoch is the same."""

    def of(size: int, seed: int) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(torch.arange(50), **order(size, torch.Generator().manual_seed(seed)))

    for stop in (1, 4):
        whole = of(4, 1)
        batches = iter(whole)
        found = samples(islice(batches, stop))
        told, left = whole.state_dict(), samples(batches)
        second = of(6, 2)
        second.load_state_dict(told)
        assert second.position == (0, stop * 4 // 6, stop)
        batches = iter(second)
        found += samples(islice(batches, 1))
        third = of(5, 3)
        third.load_state_dict(second.state_dict())
        assert samples(third) == left[6:]
        assert samples(batches) == left[6:]
        assert samples(second) == samples(third) == samples(whole)
        with pytest.raises(ValueError, match="batch_size=6: the state was saved with 4"):
            second.replay(0, state=told)


def test_another_batch_size_is_refused_where_the_order_may_depend_on_it() -> None:
    one, other = (
        StatefulDataLoader(range(20), size, sampler=WeightedRandomSampler([1.0] * 20, 20)) for size in (4, 5)
    )
    with pytest.raises(ValueError, match="field 'batch_size': 4 was saved, and the loader has 5"):
        other.load_state_dict(state(one))


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


@pytest.mark.processes
def test_an_iterable_dataset_goes_on_with_as_many_workers_and_refuses_others() -> None:
    with StatefulDataLoader(Says("tensors", (5, 5)), 2, num_workers=2) as two:
        told = state(two)
    with pytest.raises(ValueError, match="field 'num_workers': 2 was saved, and the loader has 0"):
        StatefulDataLoader(Says("tensors", (5,)), 2).load_state_dict(told)


class Table(MapDataset):
    """Says how it stands, with indices."""

    state_dict, load_state_dict = Says.state_dict, Says.load_state_dict


def test_a_dataset_with_indices_has_a_state_in_both_loaders_or_in_none() -> None:
    plain, stateful = (StatefulDataLoader(kind("tensors", 4), 2) for kind in (MapDataset, Table))
    for saved, other, has in ((plain, stateful, "the loader's"), (stateful, plain, "that was saved")):
        with pytest.raises(ValueError, match=rf"field 'dataset_state': only .*{has}.* state_dict"):
            other.load_state_dict(saved.state_dict())


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


@pytest.mark.parametrize("sampler_state", [3, {}, {"told": "x"}])
def test_what_a_sampler_refuses_is_named_and_nothing_is_taken(sampler_state: Any) -> None:
    sampler = Counts()
    one = loader(shuffle=None, sampler=sampler)
    before = generators.state_of(one.generator)
    told = loader(shuffle=None, sampler=Counts(), seed=4).state_dict()
    told["_index_sampler_state"] = sampler_state
    with pytest.raises(ValueError, match="field '_index_sampler_state'"):
        one.load_state_dict(told)
    assert generators.same(before, generators.state_of(one.generator))
    assert sampler.told == 0


def test_an_empty_state_is_a_loader_that_was_not_iterated() -> None:
    one = loader()
    one.load_state_dict(state())
    one.load_state_dict({})
    assert one.position == (0, 0, 0)
    assert len(list(one)) == 5


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
