"""Drawn programs: functions of all kinds share places, draw, are copied, edited, forked and killed. Each
value is what a plain call returns, and no random number comes twice."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import random
import signal
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lmdb")

import contextlib

from fastq_loader import cached
from tests.support.forking import end_of, fork
from tests.support.thorough import seeds

#: Numbers that no two calls share: of a value that was drawn, one that comes twice is frozen.
GLOBAL = random.Random(1)


def scaled(index: Any, scale: Any = 1) -> Any:
    return {"array": np.full(index % 400 + 1, index), "scale": repr(scale), "index": repr(index)}


class Reader:
    """As people write it: a method that is cached in its class, or for one object."""

    def __init__(self, scale: Any, **options: Any) -> None:
        self.scale, self.numbers = scale, None
        if options:
            self.decode = cached(self.decode, **options)  # type: ignore[method-assign]

    def decode(self, index: Any) -> Any:
        return scaled(index, self.scale)

    def __call__(self, index: Any) -> Any:
        return scaled(index, self.scale)

    @functools.partial(cached, limit="1MB")
    def in_class(self, index: Any) -> Any:
        return scaled(index, self.scale)


Reader(1).in_class(1)  # what a process opens once


def edited(scale: Any) -> Callable[[Any], Any]:
    """A function of one name, with other code for each scale, as after an edit between two runs."""
    names: dict[str, Any] = {"scaled": scaled, "scale": scale, "__name__": __name__}
    exec("def decode(index):\n    return scaled(index, scale)", names)
    return names["decode"]


def defaulting(scale: Any) -> Callable[[Any], Any]:
    def decode(index: Any, scale: Any = scale) -> Any:
        return scaled(index, scale)

    return decode


KINDS: dict[str, Callable[[Any], Any]] = {
    "edited": edited,
    "closure": lambda scale: lambda index: scaled(index, scale),
    "default": defaulting,
    "method": lambda scale: Reader(scale).decode,
    "object": Reader,
    "partial": lambda scale: partial(Reader(scale)),
}
SCALES = [1, 1.0, True, "1", b"1", (1,), {"a": 1}, {"b": 1}, Path("1"), None, np.float32(1)]
Options = dict[str, Any]
#: Programs with the value that a plain call returns.
Program = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def program(rng: random.Random, places: dict[str, list[Options]]) -> Program:
    kind, scale = rng.choice([*KINDS, "holder", "copy", "class"]), rng.choice(SCALES)
    if kind == "class":
        return Reader(scale).in_class, partial(scaled, scale=scale)
    if kind in KINDS:
        function = KINDS[kind](scale)
        options = rng.choice([{}, *places.get(kind, [])])
        return cached(function, limit="1MB", **{"version": 1, **options}), partial(scaled, scale=scale)
    holder = Reader(scale, limit="1MB", **rng.choice([{}, *places.get("method", [])]))
    if kind == "copy":
        holder = copy.deepcopy(holder)
        holder.scale = scale = rng.choice(SCALES)
    return lambda index: holder.decode(index), partial(scaled, scale=scale)


def call(programs: list[Program], rng: random.Random, times: int) -> None:
    for _ in range(times):
        function, plain = rng.choice(programs)
        index = rng.choice([int, np.int64])(rng.randrange(20))
        value, right = function(index), plain(index)
        assert all(np.array_equal(value[key], right[key]) for key in right), (function, value, right)
        value["array"] += 1  # it is the caller's own


def child(programs: list[Program], places: dict[str, list[Options]], seed: int) -> None:
    rng = random.Random(seed)
    call(programs, rng, 10)
    own = [program(rng, places) for _ in range(3)]
    for function, plain in [*own]:
        with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):
            own.append((pickle.loads(pickle.dumps(function)), plain))
    call(programs + own, rng, 20)


@pytest.mark.processes
@seeds(4, 100)
def test_no_program_gets_a_wrong_value(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a killed process leaves its file of a name
    rng, places = random.Random(seed), {}
    for kind in {*rng.sample(sorted(KINDS), 3), "method"}:
        place = {"path": tmp_path / kind}, {"name": f"{os.getpid()} {seed} {kind}"}
        places[kind] = [{**each, "version": 1} for each in place]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = [program(rng, places) for _ in range(10)]
        for _ in range(3):
            call(programs, rng, 20)
            children = [fork(partial(child, programs, places, rng.randrange(10**6))) for _ in range(2)]
            call(programs, rng, 10)
            if rng.random() < 0.5:
                os.kill(children[0], signal.SIGKILL)
            for pid in children:
                assert end_of(pid) in (0, -signal.SIGKILL), f"seed {seed}"
            programs.append(program(rng, places))


class Drawing(Reader):
    """Draws from a generator that is made at the first call, fresh, from a seed, global, ..."""

    def __init__(self, source: str, **options: Any) -> None:
        self.source = source
        super().__init__(1, **options)

    def decode(self, index: Any) -> Any:
        if self.source == "lazy" and self.numbers is None:
            self.numbers = np.random.default_rng(3)  # type: ignore[assignment]
        draws: dict[str, Callable[[], Any]] = {
            "lazy": lambda: self.numbers.random(),  # type: ignore[attr-defined]
            "fresh": lambda: np.random.default_rng().random(),
            "seed": lambda: np.random.default_rng(next(COUNT)).random(),
            "global": GLOBAL.random,
            "torch": lambda: torch.rand((), generator=TORCH).item(),
            "numpy": np.random.random,
            "normal": lambda: random.gauss(0, 1),
            "system": lambda: os.urandom(8),
        }
        return {"index": index, "number": draws[self.source]()}


COUNT, TORCH = itertools.count(), torch.Generator().manual_seed(1)
SOURCES = ["lazy", "fresh", "seed", "global", "torch", "numpy", "normal", "system"]


@pytest.mark.processes
@seeds(8, 100)
def test_no_random_number_comes_twice(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    options: Options = rng.choice([{}, {"path": tmp_path / "values"}, {"name": f"{os.getpid()} {seed}"}])
    holder = Drawing(SOURCES[seed % len(SOURCES)], limit="1MB", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = [holder.decode(rng.randrange(5))["number"] for _ in range(20)]
        for _ in range(2):  # the next run, and a copy
            holder = copy.deepcopy(holder)
            seen += [holder.decode(rng.randrange(5))["number"] for _ in range(20)]
        assert len({*seen}) == len(seen)
