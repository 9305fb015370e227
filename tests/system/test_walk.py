"""A walk over objects: it finds what it looks for, wherever that is, or says that it has not seen all."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from fastq_loader.system import walk
from fastq_loader.system.walk import Walk
from tests.support.graphs import BESIDE, HOLD, Plain, attributes, graphs, held_by, many_objects, much_data
from tests.support.thorough import examples

KINDS = (random.Random,)


def walked(root: Any, **more: Any) -> Walk:
    return Walk({"root": root}, KINDS, **more)


@pytest.mark.parametrize("way", HOLD)
def test_it_looks_into_whatever_holds_something(way: str) -> None:
    wanted = random.Random(1)
    found = walked(Plain(held=held_by([way], wanted)))
    if way == "generator" and sys.version_info < (3, 11):
        assert found.unseen  # its frame, which leads out of the graph
        return
    assert [*found.found.values()] == [wanted]
    assert not found.unseen
    assert not found.large


@examples(600)
@given(graphs())
def test_it_finds_all_or_says_that_it_has_not_seen_all(graph: tuple[list[str], str, bool]) -> None:
    wanted = random.Random(1)
    found = walked(Plain(**attributes(graph, wanted)))
    assert any(each is wanted for each in found.found.values()) or found.unseen or found.large
    if graph[1] in ("nothing", "data") and not {"many", "large dict"} & {*graph[0]}:
        # Of a generator that a debugger looks at, the frame is another object, which leads out of the graph.
        assert "generator" in graph[0] or not found.unseen
        assert any(each is wanted for each in found.found.values()) or found.unseen
        assert found.large == (["root.beside"] if graph[1] == "data" else [])


@pytest.mark.parametrize("beside", BESIDE)
def test_own_attributes_come_before_what_they_hold(beside: str) -> None:
    """Also before the parts of datasets that are other attributes."""
    wanted = random.Random(1)
    one, other = (Plain(samples=BESIDE[beside](), inner=Plain(samples=many_objects(90))) for _ in range(2))
    root = Plain(dataset=one, inner=Plain(rng=wanted), other=other)
    assert walked(root).found == {"root.inner.rng": wanted}


def test_plain_containers_count_less_and_yet_they_count() -> None:
    few, many = ([[Plain(), *much_data(90)] for _ in range(count)] for count in (80, 200))
    assert not walked(few).unseen
    assert walked(many).unseen


def test_it_visits_a_thousand_objects_and_names_the_first_one_that_is_left() -> None:
    chain: Any = random.Random(1)
    for _ in range(walk._MOST_OBJECTS - 2):  # and their class with its methods
        chain = Plain(inner=chain)
    assert not walked(chain).unseen
    found = walked([[[Plain(outer=chain)]]])
    assert (found.found, found.unseen) == ({}, ["root.0.0.0.outer" + ".inner" * 996])


@pytest.mark.parametrize(
    ("container", "says"),
    [
        (much_data(1001), "large"),
        ([[{"box": [[1.0, 2.0]], "name": None, "size": np.float32(2)}]] * 1001, "large"),
        (dict.fromkeys(range(1001), 0), "large"),
        (np.array(["a"] * 1001, object), "large"),
        (np.zeros(5000), ""),
        ([b""] * 99, ""),
        (many_objects(1001), "unseen"),
        ([np.zeros(1)] * 1001, "large"),
    ],
    ids=["tuples", "annotations", "dict", "names", "numbers", "few", "objects", "arrays"],
)
def test_of_a_large_container_the_first_members_are_looked_at(container: Any, says: str) -> None:
    found = walked([Plain(part=container)])
    assert ("root.0.part" in found.large, "root.0.part" in found.unseen) == (
        says == "large",
        says == "unseen",
    )
