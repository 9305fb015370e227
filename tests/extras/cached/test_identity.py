"""Identities of functions: the same for what computes the same values, and different or none for all else."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fastq_loader.extras.cached import identity
from fastq_loader.extras.cached.identity import NotPlain, digest_of, name_of, source_of
from tests.support.thorough import examples, thorough


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: Any = 1


class Reader:
    def __init__(self, held: Any = None) -> None:
        self.held = held

    def read(self, index: int) -> Any:
        return index, self.held

    def other(self, index: int) -> Any:
        return index

    def __call__(self, index: int) -> Any:
        return index, self.held


def read(index: int, held: Any = None) -> Any:
    return index, held


def closed(held: Any) -> Any:
    return lambda index: (index, held)


def defaulting(held: Any) -> Any:
    return lambda index, more=held: (index, more)


def digest(function: Any) -> bytes:
    return digest_of(function)


WAYS = {
    "method": lambda held: Reader(held).read,
    "object": Reader,
    "partial": lambda held: functools.partial(read, held=held),
    "partial of an object": lambda held: functools.partial(Reader(held), 3),
    "closure": closed,
    "default": defaulting,
}
LEAVES = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.sampled_from([Path("a"), Color.RED, torch.float32, np.int64(1), read, Reader, Point(2), range(3)]),
    arrays.arrays(st.sampled_from([np.uint8, np.float32]), arrays.array_shapes(max_side=2, min_side=0)),
)
PLAIN = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), parts, max_size=2),
    ),
    max_leaves=5,
)


def typed(value: Any) -> Any:
    """With types and bits."""
    if isinstance(value, np.ndarray | np.generic):
        return repr(value.dtype), value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value), [typed(part) for part in value]
    if isinstance(value, dict):
        return [(typed(key), typed(part)) for key, part in value.items()]
    return type(value), repr(value)


@examples(200)
@given(st.sampled_from(sorted(WAYS)), PLAIN, PLAIN)
def test_what_holds_other_data_is_another_function(way: str, one: Any, other: Any) -> None:
    make = WAYS[way]
    assert (digest(make(one)) == digest(make(other))) == (typed(one) == typed(other))
    assert digest(make(one)) == digest(make(one))


def test_functions_ways_and_classes_are_kept_apart() -> None:
    class Local(Reader): ...

    reader = Reader(3)
    functions = [read, reader, reader.read, reader.other, Local(3), functools.partial(read, 3), np.zeros]
    functions += [functools.partial(read, held=3), lambda index: index, lambda index: index + 1, closed(3)]
    functions += [defaulting(3), torch.tensor, max, [1].index, [2].index]
    assert len({(name_of(function), digest(function)) for function in functions}) == len(functions)


@pytest.mark.parametrize(
    "held",
    [
        object(),
        threading.Lock(),
        Reader(),
        iter([]),
        np.random.default_rng(0),
        [Reader()],
        {"a": {3: Reader()}},
    ],
    ids=lambda held: type(held).__name__,
)
@pytest.mark.parametrize("way", sorted(WAYS))
def test_what_is_no_plain_data_is_named(way: str, held: Any) -> None:
    if way == "partial" and type(held) is Reader:
        held = Point(held)
    with pytest.raises(NotPlain, match=r"\b(held|more)\b"):
        digest(WAYS[way](held))


def test_an_object_of_a_class_in_c_is_refused() -> None:
    class Names(list):  # type: ignore[type-arg]
        def read(self, index: int) -> Any:
            return self[index]

    with pytest.raises(NotPlain, match=r"Names\.read\.self is"):
        digest(Names(["a"]).read)


def test_a_wrapped_function_is_the_wrapper_and_the_function() -> None:
    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(index: int) -> Any:
            return function(index), function(index)

        return wrapper

    wrapped = [twice(read), twice(lambda index: index), twice(lambda index: index + 1), read]
    assert len({digest(function) for function in wrapped}) == 4


def test_containers_in_themselves_and_sets_have_an_identity() -> None:
    around: list[Any] = [1]
    around.append(around)
    assert digest(closed(around)) == digest(closed(around)) != digest(closed([1, [1]]))
    names = [f"name {number}" for number in range(50)]
    one, other = set(names), set[str]()
    for name in reversed(names):
        other.add(name)
    assert digest(closed(one)) == digest(closed(other)) != digest(closed(set(names[1:])))


def test_functions_of_a_notebook_have_code_and_no_file() -> None:
    namespace: dict[str, Any] = {}
    exec("def decode(index): return index\ndef other(index): return index + 1", namespace)
    assert source_of(namespace["decode"]).file == ""
    assert source_of(namespace["decode"]).code != source_of(namespace["other"]).code
    assert source_of(read).file == __file__
    assert source_of(np.zeros) == source_of(max) == identity.Source("", "")


SCRIPT = """
import functools
from fastq_loader.extras.cached.identity import digest_of, name_of

def decode(index, names={"a", "b", "c"}):
    return index in {"x", "y", "z"}

def show():
    for each in (decode, lambda index: index in {"x", "y", "z"}, functools.partial(decode, 3)):
        print(name_of(each), digest_of(each).hex())

if __name__ != "train":
    show()
"""


def test_a_script_is_the_module_that_imports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program, in a spawned worker, and imported."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    outputs = []
    for name in ("__main__", "__mp_main__"):
        runpy.run_path(str(tmp_path / "train.py"), run_name=name)
        outputs.append(capsys.readouterr().out)
    importlib.import_module("train").show()
    outputs.append(capsys.readouterr().out)
    del sys.modules["train"]
    assert outputs[0] == outputs[1] == outputs[2]
    names = [line.split()[0] for line in outputs[0].splitlines()]
    assert names == ["train.decode", "train.show.<locals>.<lambda>", "train.decode"]


@thorough()
@pytest.mark.processes
def test_identities_do_not_depend_on_the_seed_of_hashes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = {
        subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**environment, "PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
        ).stdout
        for seed, arguments in enumerate((["train.py"], ["-m", "train"]))
    }
    assert len(outputs) == 1
