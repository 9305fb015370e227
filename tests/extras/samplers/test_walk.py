"""A walk over objects: it finds what it looks for, wherever that is, or says that it has not seen all."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from fastq_loader.extras.samplers import walk
from fastq_loader.extras.samplers.walk import Walk
from tests.support.graphs import HOLD, Plain, held_by

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


def test_it_visits_a_thousand_objects_and_names_the_first_one_that_is_left() -> None:
    chain: Any = random.Random(1)
    for _ in range(walk._MOST_OBJECTS - 2):  # and their class with its methods
        chain = Plain(inner=chain)
    assert not walked(chain).unseen
    found = walked([[[Plain(outer=chain)]]])
    assert (found.found, found.unseen) == ({}, ["root.0.0.0.outer" + ".inner" * 996])
