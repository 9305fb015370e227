"""Who gets how many workers of a cluster. Ray is played here, and real in `end_to_end`."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.remote.shares import NAMESPACE, shares_actor, shares_class


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cluster of whose CPUs `cpus` are free, at the time `now`."""
    played = SimpleNamespace(cpus=0.0, now=0.0)
    played.available_resources = lambda: {"CPU": played.cpus}
    monkeypatch.setattr(importlib, "import_module", lambda name: {"ray": played}[name])
    monkeypatch.setattr(time, "monotonic", lambda: played.now)
    return played


def test_a_loader_alone_may_have_all_that_it_wants(ray: SimpleNamespace) -> None:
    shares = shares_class()()
    ray.cpus = 4
    assert shares.report("a", 3, 0, 1) == 3
    assert shares.report("a", 9, 0, 1) == 4


def test_who_has_all_shares_it_with_who_comes_later(ray: SimpleNamespace) -> None:
    shares = shares_class()()
    assert shares.report("a", 4, 4, 1) == 4
    assert shares.report("b", 4, 0, 1) == 2
    assert shares.report("a", 4, 4, 1) == 2


def test_a_cpu_on_its_way_to_another_loader_is_not_missed(ray: SimpleNamespace) -> None:
    shares = shares_class()()
    shares.report("a", 4, 4, 1)
    shares.report("b", 4, 0, 1)
    assert shares.report("a", 4, 2, 1) == 2, "Ray does not say yet that two are free"
    ray.now = 9.0
    shares.report("b", 4, 0, 1)
    ray.now = 11.0
    assert shares.report("a", 4, 2, 1) == 1, "two are really gone"


def test_who_is_not_heard_any_more_is_forgotten(ray: SimpleNamespace) -> None:
    shares = shares_class()()
    ray.cpus = 4
    shares.report("a", 4, 0, 1)
    assert shares.report("b", 4, 0, 1) == 2
    ray.now = 10.0
    assert shares.report("b", 4, 0, 1) == 4


def test_each_may_have_one_where_there_is_none(ray: SimpleNamespace) -> None:
    shares = shares_class()()
    assert [shares.report(name, 2, 0, 1) for name in "abc"] == [1, 1, 1]


WANTS = st.dictionaries(st.text(max_size=3), st.integers(0, 20), min_size=1, max_size=5)


@given(WANTS, st.integers(0, 40))
def test_all_get_the_same_as_far_as_they_want_it_and_nothing_is_left_over(
    wants: dict[str, int], cpus: int
) -> None:
    shares = shares_class()()
    shares.loaders = {name: (0.0, want, 0, 1.0) for name, want in wants.items()}
    given = shares.divided(float(cpus))
    assert sum(given.values()) == min(cpus, sum(wants.values()))
    short = [given[name] for name in wants if given[name] < wants[name]]
    assert all(given[name] <= min(short, default=99) + 1 for name in wants)


def test_there_is_one_actor_for_all_loaders_and_it_takes_no_cpu() -> None:
    options: dict[str, Any] = {}
    actor = SimpleNamespace(remote=lambda: "the actor")
    made = SimpleNamespace(options=lambda **given: options.update(given) or actor)
    assert shares_actor(SimpleNamespace(remote=lambda kind: made)) == "the actor"
    assert options == {"name": "shares", "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
