"""What forked children may see: forks, births and deaths in any order, with descriptors or without."""

from __future__ import annotations

import os
import resource
import threading
from weakref import WeakValueDictionary

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.memory import forked_children
from fastq_loader.memory.forked_children import seen_before
from tests.support.simulated_fork import Fork
from tests.support.thorough import examples


class Owner:
    leased = True


IN_USE = Owner()


@pytest.fixture(autouse=True)
def _no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_children, "living", [])
    monkeypatch.setattr(forked_children, "owners", owners := WeakValueDictionary())
    owners[1] = IN_USE


@examples(200)
@given(st.lists(st.tuples(st.sampled_from(("birth", "fork", "child dies")), st.integers(0, 5)), max_size=30))
def test_a_block_may_be_seen_by_the_living_children_that_were_forked_later(
    steps: list[tuple[str, int]],
) -> None:
    children: list[Fork] = []  # that are alive
    births: list[tuple[int, list[Fork]]] = []  # moment, and the children that were forked later
    for step, which in steps:
        if step == "birth":
            births.append((forked_children.now, []))
        elif step == "fork":
            children.append(Fork())
            for _, later in births:
                later.append(children[-1])
        elif children:
            children.pop(which % len(children)).die()
        seen = seen_before()
        assert [born < seen for born, _ in births] == [bool({*later} & {*children}) for _, later in births]
    while children:
        children.pop().die()
    assert seen_before() == 0


def test_during_a_fork_everything_may_be_seen() -> None:
    """Also if a fork on another thread begins and ends meanwhile."""
    fork = Fork(finish=False)
    other = threading.Thread(target=lambda: Fork().die())
    other.start()
    other.join()
    assert forked_children.now < seen_before()
    fork.finish()
    assert forked_children.now >= seen_before()
    fork.die()


def test_children_that_are_gone_are_forgotten_at_the_next_fork() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Fork().die()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert seen_before() == 0
    assert len(os.listdir("/proc/self/fd")) <= before


def test_without_descriptors_a_child_counts_for_ever() -> None:
    born = forked_children.now
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        Fork().die()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert born < seen_before()
    assert forked_children.now >= seen_before()
