"""What forked children may see: forks, births and deaths in any order, with descriptors or without."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.memory.forked_children import ForkedChildren, tick
from tests.support.simulated_fork import Fork
from tests.support.thorough import examples


@contextmanager
def watching() -> Iterator[ForkedChildren]:
    watched = ForkedChildren()
    try:
        yield watched
    finally:
        watched.close()


EVENTS = st.sampled_from(("birth", "death", "fork", "finish", "child dies"))


@examples(200)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 5)), max_size=30))
def test_a_thing_may_be_seen_by_the_children_whose_forks_it_met(steps: list[tuple[str, int]]) -> None:
    with watching() as watched, ExitStack() as stack:
        forks: list[Fork] = []
        living: list[tuple[int, list[Fork]]] = []  # (moment of birth, forks that met it)
        dead: list[tuple[int, int, list[Fork]]] = []
        for step, which in steps:
            if step == "birth":
                watched.owned += 1
                living.append((tick(), [fork for fork in forks if fork.under_way]))
            elif step == "death" and living:
                born, met = living.pop(which % len(living))
                dead.append((born, tick(), met))
            elif step == "fork":
                forks.append(Fork(watched))
                stack.callback(forks[-1].die)
                for _, met in living:
                    met.append(forks[-1])
            elif step in ("finish", "child dies") and forks:
                fork = forks[which % len(forks)]
                fork.finish() if step == "finish" else fork.die()
            watched.reap()
            for born, died, met in dead:
                assert watched.may_see(born, died) == any(fork.alive for fork in met)


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def test_children_that_are_gone_are_forgotten_at_the_next_fork() -> None:
    before = len(descriptors())
    with watching() as watched:
        watched.owned = 1
        for _ in range(20):
            Fork(watched).die()
        assert len(descriptors()) <= before + 1
    assert len(descriptors()) == before


@pytest.mark.parametrize("closed", [False, True])
def test_without_descriptors_every_child_counts(closed: bool) -> None:
    """None is left, or the owner has given its own back."""
    with watching() as watched:
        watched.owned = 1
        born, before = tick(), descriptors()
        if closed:
            watched.close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft if closed else 3, hard))
        try:
            for _ in range(10):
                Fork(watched).die()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before
        watched.reap()
        assert watched.may_see(born, tick())
        assert not watched.may_see(tick(), tick())
        assert len(watched.alive) == (1 if closed else 10)
