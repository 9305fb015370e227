"""Drawn programs: functions of all kinds share places, read their shard, draw, are copied, edited, forked and
killed. Each value is what a plain call returns, no random number comes twice, and no pure function is
distrusted."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import pickle
import random
import signal
import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils import worker as torchs

from fastq_loader import cached
from fastq_loader.extras.images.encoded import encoded
from tests.support.forking import end_of, fork
from tests.support.photographs import file_of, photograph
from tests.support.thorough import seeds

Options = dict[str, Any]
#: Programs with the value that a plain call returns.
Program = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def begin_as(number: int | None, seed: int = 0) -> None:
    """This process is a worker, or a rank."""
    global shard
    shard = 0 if number is None else number
    if number is not None:
        torchs._worker_info = torchs.WorkerInfo(id=number, num_workers=3, seed=seed, dataset=None)
    for reseed in (GLOBAL.seed, random.seed, np.random.seed, torch.manual_seed, TORCH.manual_seed):
        reseed(seed)


def scaled(index: Any, scale: Any = 1) -> Any:
    return {"array": np.full(index % 400 + 1, index), "scale": repr(scale), "index": repr(index)}


def of_shard(index: Any, scale: Any = 1) -> Any:
    """By the same numbers, each worker reads other files."""
    return scaled(index, (scale, shard))


class Reader:
    """As people write it: a method that is cached in its class, or for one object."""

    def __init__(self, scale: Any, **options: Any) -> None:
        self.scale = scale
        if options:
            self.decode = cached(self.decode, **options)  # type: ignore[method-assign]

    def decode(self, index: Any) -> Any:
        return scaled(index, self.scale)

    @functools.partial(cached, limit="1MB")
    def in_class(self, index: Any) -> Any:
        return scaled(index, self.scale)

    @functools.partial(cached, limit="1MB")
    def shard_in_class(self, index: Any) -> Any:
        return of_shard(index, self.scale)


shard = 0
Reader(1).in_class(1)  # what a process opens once
Reader(1).shard_in_class(1)


def edited(scale: Any) -> Callable[[Any], Any]:
    """A function of one name, with other code for each scale, as after an edit between two runs."""
    names: dict[str, Any] = {"scaled": scaled, "scale": scale, "__name__": __name__}
    exec("def decode(index):\n    return scaled(index, scale)", names)
    return names["decode"]


def one_of_a_name(scale: Any) -> Callable[[Any], Any]:
    class Dataset(Reader):
        def decode(self, index: Any) -> Any:
            return scaled(index, self.scale)

    return Dataset(scale).decode


#: The scale is what they depend on: a root, train or val, a helper, a version of the code.
KINDS: dict[str, Callable[[Any], Any]] = {
    "edited": edited,
    "closure": lambda scale: lambda index: scaled(index, scale),
    "method": lambda scale: Reader(scale).decode,
    "class of one name": one_of_a_name,
    "shard": lambda scale: lambda index: of_shard(index, scale),
}
SCALES = [1, 1.0, True, "1", b"1", (1,), {"a": 1}, {"b": 1}, Path("1"), None, np.float32(1)]


def program(rng: random.Random, places: dict[str, list[Options]]) -> Program:
    kind, scale = rng.choice([*KINDS, "holder", "copy", "class", "class"]), rng.choice(SCALES)
    if kind == "class":
        method, plain = rng.choice([("in_class", scaled), ("shard_in_class", of_shard)])
        return getattr(Reader(scale), method), partial(plain, scale=scale)
    if kind in KINDS:
        options = rng.choice([{}, *places.get(kind, [])])
        if kind == "shard" and "path" in options:  # whose earlier writers count as one
            options = {}
        wrapped = cached(KINDS[kind](scale), limit="1MB", **{"version": 1, **options})
        return wrapped, partial(of_shard if kind == "shard" else scaled, scale=scale)
    holder = Reader(scale, limit="1MB", **rng.choice([{}, *places.get("method", [])]))
    if kind == "copy":
        holder = rng.choice([copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])(holder)
        holder.scale = scale = rng.choice(SCALES)
    return lambda index: holder.decode(index), partial(scaled, scale=scale)


def call(programs: list[Program], rng: random.Random, times: int) -> None:
    for _ in range(times):
        function, plain = rng.choice(programs)
        index = rng.choice([int, np.int64])(rng.randrange(20))
        value, right = function(index), plain(index)
        assert all(np.array_equal(value[key], right[key]) for key in right), (function, value, right)
        value["array"] += 1  # it is the caller's own


def child(programs: list[Program], places: dict[str, list[Options]], number: int, seed: int) -> None:
    rng = random.Random(seed)
    begin_as(number)
    call(programs, rng, 10)
    own = [program(rng, places) for _ in range(3)]
    for function, plain in [*own]:
        with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):
            own.append((pickle.loads(pickle.dumps(function)), plain))
    call(programs + own, rng, 20)


@pytest.mark.processes
@seeds(4, 100)
@pytest.mark.filterwarnings("ignore")
def test_no_program_gets_a_wrong_value(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a killed process leaves its file of a name
    rng, places = random.Random(seed), {}
    for kind in {*rng.sample(sorted(KINDS), 4), "method"}:
        place = {"path": tmp_path / kind}, {"name": f"{os.getpid()} {seed} {kind}"}
        places[kind] = [{**each, "version": 1} for each in place]
    programs = [program(rng, places) for _ in range(10)]
    for _ in range(3):
        call(programs, rng, 20)
        numbers = rng.sample(range(3), 2)
        drawn = [partial(child, programs, places, number, rng.randrange(10**6)) for number in numbers]
        children = [fork(each) for each in drawn]
        call(programs, rng, 10)
        if rng.random() < 0.5:
            os.kill(children[0], signal.SIGKILL)
        for pid in children:
            assert end_of(pid) in (0, -signal.SIGKILL), f"seed {seed}"
        programs.append(program(rng, places))


# ---- random numbers ----------------------------------------------------------------------------------------

#: Generators that the function reaches by a global name, and the numbers of fresh ones.
GLOBAL, TORCH, COUNT = random.Random(1), torch.Generator().manual_seed(1), itertools.count()


class Drawing(Reader):
    """Draws from a generator that is made at the first call, for the worker or the epoch, fresh, from a seed,
    in a library, ..."""

    def __init__(self, source: str, **options: Any) -> None:
        self.source, self.numbers, self.epoch = source, {}, 0
        super().__init__(1, **options)

    def own(self, *made_for: Any) -> float:
        """Of the object's own generator, which is made when it is needed, or made anew."""
        if made_for not in self.numbers:
            self.numbers = {made_for: np.random.default_rng((*made_for, next(COUNT)))}
        return float(self.numbers[made_for].random())

    def decode(self, index: Any) -> Any:
        return {"index": index, "number": SOURCES[self.source](self)}


SOURCES: dict[str, Callable[[Drawing], Any]] = {
    "lazy": lambda self: self.own(3),
    "of the worker": lambda self: self.own(4, os.getpid(), shard),
    "of the epoch": lambda self: self.own(5, self.epoch),
    "fresh": lambda self: np.random.default_rng().random(),
    "seed": lambda self: np.random.default_rng((next(COUNT), os.getpid())).random(),
    "global": lambda self: GLOBAL.random(),
    "torch": lambda self: torch.rand((), generator=TORCH, dtype=torch.float64).item(),
    "torch's own": lambda self: torch.rand((), dtype=torch.float64).item(),
    "numpy": lambda self: np.random.random(),
    "normal": lambda self: random.gauss(0, 1),
    "numpy's normal": lambda self: np.random.standard_normal(),
    "system": lambda self: os.urandom(8),
    "library": lambda self: str(uuid.uuid4()),
}


def draw(holder: Drawing, rng: random.Random, seen: list[Any]) -> None:
    for _ in range(15):
        seen.append(holder.decode(rng.randrange(5))["number"])
        holder.epoch += rng.random() < 0.1
    assert len({*seen}) == len(seen), holder.source


@pytest.mark.processes
@seeds(13, 200)
@pytest.mark.filterwarnings("ignore")
def test_no_random_number_comes_twice(seed: int, tmp_path: Path) -> None:
    rng, seen = random.Random(seed), []
    places: list[Options] = [{}, {"path": tmp_path / "values"}, {"name": f"{os.getpid()} {seed}"}]
    holder = Drawing([*SOURCES][seed % len(SOURCES)], limit="1MB", **rng.choice(places))

    def work(number: int, drawn: int) -> None:
        begin_as(number, drawn)
        next(COUNT), holder.numbers.clear()
        draw(holder, rng, seen)

    for _ in range(3):  # the next run, and a copy
        draw(holder, rng, seen)
        for number in range(2):
            next(COUNT)
            assert end_of(fork(partial(work, number, rng.randrange(10**6)))) == 0, f"seed {seed}"
        holder = copy.deepcopy(holder)
        next(COUNT), holder.numbers.clear()


# ---- no false alarms ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    image: Any
    about: dict[str, Any]


PURE: list[Callable[[int], Any]] = [
    lambda index: torch.arange(300_000.0).sin().abs().sum() * index,
    lambda index: (torch.arange(40_000.0).cos().view(200, 200) @ torch.ones(200, 200)) + index,
    lambda index: torch.linspace(0, 1, 5000).half().cumsum(0) + index,
    lambda index: torch.linspace(0, 1, 500).bfloat16() * torch.randn(500, generator=TORCH.manual_seed(index)),
    lambda index: np.random.default_rng(index).normal(size=500).astype(np.float16),
    lambda index: np.fft.fft(np.arange(1000.0) + index),
    lambda index: {"mean": float(np.sqrt(np.arange(1e4)).mean()), "set": {f"{index}", "a", float("nan")}},
    lambda index: Sample(torch.full((3, 4), index).T, {"nan": np.array([np.nan, index]), "list": [None, 2j]}),
    lambda index: np.ma.masked_less(np.arange(9.0), index),
    lambda index: torch.eye(4).to_sparse() * index,
    lambda index: encoded(file_of(photograph(4, 5, index), "PNG")),
    lambda index: pytest.importorskip("PIL.Image").fromarray(photograph(4, 5, index)),
]


@seeds(12, 100)
def test_a_pure_function_raises_no_alarm(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    rng = random.Random(seed)
    places: list[Options] = [{}, {"path": tmp_path / "values", "version": 1}, {"copy": False}]
    wrapped = cached(PURE[seed % len(PURE)], limit="9MB", **rng.choice(places))

    before = torch.get_num_threads()  # in this process: OpenMP's threads are not forked
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            for index in range(5):
                wrapped(index)
    finally:
        torch.set_num_threads(before)
    found = wrapped.statistics()
    assert found.checked >= 10
    assert (found.distrusted, found.unchecked, found.refused) == (0, 0, 0)
