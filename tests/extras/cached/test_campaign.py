"""Drawn programs: functions of all kinds share places, are copied, changed, pickled, forked and killed. Each
call has the value that the function alone would return."""

from __future__ import annotations

import copy
import functools
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

pytest.importorskip("lmdb")

from fastq_loader import cached
from tests.support.forking import end_of, fork
from tests.support.thorough import seeds


def scaled(index: Any, scale: Any = 1) -> Any:
    return {"array": np.full(index % 400 + 1, index), "scale": repr(scale), "index": repr(index)}


class Reader:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def decode(self, index: Any) -> Any:
        return scaled(index, self.scale)

    def __call__(self, index: Any) -> Any:
        return scaled(index, self.scale)

    @functools.partial(cached, limit="1MB")
    def in_class(self, index: Any) -> Any:
        return scaled(index, self.scale)


class Holder(Reader):
    """As people write it: its method is cached for itself."""

    def __init__(self, scale: Any, **options: Any) -> None:
        super().__init__(scale)
        self.decode = cached(self.decode, **options)  # type: ignore[method-assign]


Reader(1).in_class(1)  # what a process opens once

Program = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # what is called, and what it has to return


def closed(scale: Any) -> Any:
    return lambda index: scaled(index, scale)


def defaulting(scale: Any) -> Any:
    def decode(index: Any, scale: Any = scale) -> Any:
        return scaled(index, scale)

    return decode


def wrapping(scale: Any) -> Any:
    @functools.wraps(scaled)
    def decode(index: Any) -> Any:
        return scaled(index, scale)

    return decode


KINDS: dict[str, Callable[[Any], Any]] = {
    "function": lambda scale: scaled,
    "closure": closed,
    "default": defaulting,
    "wrapper": wrapping,
    "partial": lambda scale: partial(scaled, scale=scale),
    "method": lambda scale: Reader(scale).decode,
    "object": Reader,
    "partial of an object": lambda scale: partial(Reader(scale)),
}
SCALES = [1, 1.0, True, "1", b"1", [1], (1,), {"a": 1}, {"b": 1}, Path("1"), None, np.float32(1)]


Places = dict[str, list[dict[str, Any]]]  # by kind: a folder or a name belongs to functions of one name


def program(rng: random.Random, places: Places) -> Program:
    kind, scale = rng.choice([*KINDS, "holder", "copy", "class"]), rng.choice(SCALES)
    if kind == "class":
        return Reader(scale).in_class, partial(scaled, scale=scale)
    if kind not in ("holder", "copy"):
        options = rng.choice([{}, *places.get(kind, [])])
        return cached(KINDS[kind](scale), limit="1MB", **options), KINDS[kind](scale)
    holder = Holder(scale, limit="1MB", **rng.choice([{}, *places.get("method", [])]))
    if kind == "copy":
        holder, scale = copy.deepcopy(holder), rng.choice(SCALES)
        holder.scale = scale
    return lambda index: holder.decode(index), partial(scaled, scale=scale)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[key], other[key]) and type(one[key]) is type(other[key]) for key in one
    )


def call(programs: list[Program], rng: random.Random, times: int) -> None:
    for _ in range(times):
        function, plain = rng.choice(programs)
        index = rng.choice([rng.randrange(20), np.int64(rng.randrange(20))])
        value = function(index)
        assert same(value, plain(int(index))) or same(value, plain(np.int64(index))), (function, index)
        value["array"] += 1  # it is the caller's own


@pytest.mark.processes
@seeds(4, 100)
def test_no_program_gets_a_wrong_value(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a killed process leaves its file of a name
    rng = random.Random(seed)
    places: Places = {}
    for kind in [*rng.sample(sorted(KINDS), 3), "method"]:
        version = rng.choice([None, None, 1])
        place = {"path": tmp_path / kind}, {"name": f"{os.getpid()} {seed} {kind}"}
        places[kind] = [{**each, "version": version} for each in place]
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


def child(programs: list[Program], places: Places, seed: int) -> None:
    rng = random.Random(seed)
    call(programs, rng, 10)
    own = [program(rng, places) for _ in range(3)]
    travelled = [
        (pickle.loads(pickle.dumps(function)), plain) for function, plain in own if is_sent(function)
    ]
    call(programs + own + travelled, rng, 20)


def is_sent(function: Any) -> bool:
    try:
        pickle.dumps(function)
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True
