"""A walk over objects: it finds what it looks for, wherever that is, or says that it has not seen all."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from hypothesis import given

from fastq_loader.extras.samplers import walk
from fastq_loader.extras.samplers.walk import Walk
from tests.support.graphs import HOLD, Plain, attributes, graphs, held_by
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


def test_it_visits_a_thousand_objects_and_names_the_first_one_that_is_left() -> None:
    chain: Any = random.Random(1)
    for _ in range(walk._MOST_OBJECTS - 2):  # and their class with its methods
        chain = Plain(inner=chain)
    assert not walked(chain).unseen
    found = walked([[[Plain(outer=chain)]]])
    assert (found.found, found.unseen) == ({}, ["root.0.0.0.outer" + ".inner" * 996])
