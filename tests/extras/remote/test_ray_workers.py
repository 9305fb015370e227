"""What `workers=` may say about other machines; none of it needs Ray."""

from __future__ import annotations

import pickle
import re
from importlib import metadata
from typing import Any

import pytest

from fastq_loader import DataLoader, RayWorkers, options

EVERYTHING: dict[str, Any] = {
    "num_cpus": 0.5,
    "num_gpus": 2,
    "resources": {"decoder": 1},
    "strategy": "DEFAULT",
    "runtime_env": {"env_vars": {"A": "1"}},
    "address": "10.0.0.1:6379",
    "ports": (20000, 20100),
    "max_restarts": 3,
    "start_timeout": 90,
}


def version(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def asked(name: str) -> str:
        if name != "ray" or found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", asked)


@pytest.mark.parametrize("given", [{}, EVERYTHING])
def test_equal_workers_have_one_hash_and_can_be_pickled(given: dict[str, Any]) -> None:
    workers = RayWorkers(**given)
    assert {workers, pickle.loads(pickle.dumps(workers)), RayWorkers(**given)} == {workers}
    assert workers != RayWorkers(**{**given, "max_restarts": 7})


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("num_cpus", True, TypeError, "must be a number"),
        ("num_cpus", -1, ValueError, "must be 0 or more"),
        ("num_gpus", 1.5, ValueError, "must be a whole number, or a fraction below 1"),
        ("resources", ["decoder"], TypeError, "must be a dict of numbers"),
        ("resources", {"CPU": 2}, ValueError, "must not have 'CPU': use num_cpus for it"),
        ("resources", {"decoder": 0}, ValueError, "must say more than 0 of 'decoder', or leave it out"),
        ("strategy", "spread", ValueError, 'must be "SPREAD" or "DEFAULT"'),
        ("strategy", None, TypeError, 'must be "SPREAD", "DEFAULT" or an object of ray.util'),
        ("runtime_env", "pip", TypeError, "must be a dict, as for ray.init(), or None"),
        ("address", "somewhere", ValueError, 'must be "host:port", "auto" or None'),
        ("address", "ray://head:10001", ValueError, "must not be Ray's client, which is no member of"),
        ("ports", 20000, TypeError, "must be (first, last), or None"),
        ("ports", (0, 10), ValueError, "must be (first, last) with 1 <= first <= last <= 65535"),
        ("start_timeout", None, TypeError, "must be a number of seconds"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(f"RayWorkers({name}={value!r}): {name} {text}")):
        RayWorkers(**{name: value})


def test_a_wrong_number_of_restarts_for_ray_is_named() -> None:
    with pytest.raises(ValueError, match="max_restarts must not be negative: use 0 for none"):
        RayWorkers(max_restarts=-1)


@pytest.mark.parametrize("found", [None, "2.51.9", "1.13.0"])
def test_without_ray_the_error_says_what_to_install(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    version(monkeypatch, found)
    text = re.escape("pip install 'fastq-loader[ray]'")
    for workers in ("ray", RayWorkers()):
        with pytest.raises(RuntimeError, match=f"needs ray 2.52 or newer, .*{text}"):
            DataLoader(range(4), num_workers=2, workers=workers)
    made = DataLoader(range(4), workers=RayWorkers())  # it loads on the calling thread
    assert len(list(made)) == 4
    with pytest.raises(RuntimeError, match=text):
        object.__setattr__(made, "num_workers", 2), iter(made)


@pytest.mark.parametrize("found", ["2.52.0", "2.60.0", "3.0.0.dev0", "2.53.0rc1"])
def test_a_ray_that_is_new_enough_is_accepted(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version(monkeypatch, found)
    made = DataLoader(range(4), num_workers=2, workers="ray")
    assert options.of(made).workers == RayWorkers()
    assert made.workers == "ray", "it is kept as it was given"


def test_ray_replaces_workers_by_default_but_for_a_stream() -> None:
    assert RayWorkers().restarts(iterable=False) == 100
    assert RayWorkers().restarts(iterable=True) == 0
    assert RayWorkers(max_restarts=3).restarts(iterable=True) == 3
