"""Pickling with the leaves left out, storages, and the search for what cannot be pickled."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import DataLoader
from fastq_loader.errors import UnpicklableError, WorkerTraceback
from fastq_loader.packing import pickling
from fastq_loader.packing.pickling import dump, dump_exception, load, load_exception
from tests.support.datasets import Opaque, Point, Record, Slotted, assert_same
from tests.support.late_device import late_device
from tests.support.thorough import thorough


def through(value: Any) -> tuple[Any, list[Any]]:
    """A value after a trip, and the leaves that were left out."""
    leaves: list[Any] = []

    def add_leaf(leaf: Any) -> int:
        leaves.append(leaf)
        return len(leaves) - 1

    return load(dump(value, add_leaf), leaves), leaves


# ---- values -----------------------------------------------------------------------------------------


def test_tensors_and_arrays_are_left_out_wherever_they_lie() -> None:
    tensor, array = torch.rand(1000), np.arange(1000)
    value = {"a": Opaque([tensor]), "b": Point(array, Record("r", {tensor.shape: tensor}))}
    result, leaves = through(value)
    assert_same(value, result)
    assert [id(leaf) for leaf in leaves] == [id(tensor), id(array)]
    assert result["a"].value[0] is tensor
    assert len(dump(value, lambda leaf: 0)) < 1000


def test_a_tensor_with_a_graph_raises_torchs_own_words() -> None:
    graph = torch.rand(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError) as theirs:
        torch.multiprocessing.reductions.reduce_tensor(graph)
    for value in (graph, [graph], Opaque({"x": graph})):
        with pytest.raises(RuntimeError) as ours:
            through(value)
        assert ours.type is RuntimeError
        assert str(ours.value) == str(theirs.value)


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def load_inside(data: bytes) -> Any:
    return load(data, [torch.tensor(2)])


meeting = threading.Barrier(2, timeout=60)


def meet() -> int:
    return meeting.wait()


def test_loads_within_each_other_or_on_two_threads_have_their_own_leaves() -> None:
    inner = dump(torch.tensor(2), lambda leaf: 0)
    # As where unpickling iterates another loader.
    outer = dump([Call(load_inside, inner), torch.tensor(1)], lambda leaf: 0)
    assert load(outer, [torch.tensor(1)]) == [2, 1]
    # Two loaders, each iterated by a thread of its own: Python may switch between them at any call.
    data = dump([Call(meet), torch.zeros(1), Call(meet)], lambda leaf: 0)
    with ThreadPoolExecutor(2) as threads:
        loaded = list(threads.map(lambda number: load(data, [torch.tensor([number])])[1].item(), (1, 2)))
    assert loaded == [1, 2]
    with pytest.raises(ZeroDivisionError):
        load(dump([torch.rand(1), Call(divmod, 1, 0)], lambda leaf: 0), [torch.rand(1)])
    assert not getattr(pickling._building, "leaves", ()), "something of a failed load stayed"


# ---- storages ---------------------------------------------------------------------------------------


class Meta(torch.Tensor):
    """A tensor with a reducer of its own that returns a storage, as MONAI's MetaTensor has."""


def rebuild_meta(storage: torch.UntypedStorage, size: Any, stride: Any, attributes: Any) -> Meta:
    made = torch.empty(0).set_(storage, 0, size, stride).as_subclass(Meta)
    vars(made).update(attributes)
    return made


def reduce_meta(value: Meta) -> Any:
    return rebuild_meta, (value.untyped_storage(), value.size(), value.stride(), vars(value))


@pytest.fixture
def registered() -> Iterator[None]:
    ForkingPickler.register(Meta, reduce_meta)
    yield
    del ForkingPickler._extra_reducers[Meta]  # type: ignore[attr-defined]


def meta_samples(count: int) -> list[Any]:
    def sample(number: int) -> Meta:
        made = torch.full((50, 60), float(number)).as_subclass(Meta)
        made.affine = number  # type: ignore[attr-defined]
        return made

    return [[sample(number), sample(number).t()] for number in range(count)]


def collate(batch: list[Any]) -> list[Any]:
    return [*batch[0], torch.ones(4), torch.arange(6.0).untyped_storage()]


@thorough(but={"workers": 2})
@pytest.mark.processes
@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("workers", [0, 2])
def test_h4_a_reducer_that_returns_a_storage_arrives(
    workers: int, device: str | None, registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = list(torch.utils.data.DataLoader(meta_samples(5), 1, num_workers=workers, collate_fn=collate))
    with late_device(monkeypatch) if device else contextlib.nullcontext():
        ours = DataLoader(meta_samples(5), 1, num_workers=workers, collate_fn=collate, device=device)
        with ours:
            for expected, actual in zip(torchs, ours, strict=True):
                assert [type(part) for part in actual] == [type(part) for part in expected]
                assert actual[0].affine == expected[0].affine
                assert all(torch.equal(a, b) for a, b in zip(actual[:3], expected[:3], strict=True))
                assert [part.stride() for part in actual[:3]] == [part.stride() for part in expected[:3]]
                assert bytes(actual[3]) == bytes(expected[3]), "a storage stays on the host"
                del expected, actual


# ---- naming what cannot be pickled ------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    fine: Any
    transform: Any


def stuck() -> Any:
    """Something that no pickle takes."""
    return lambda: None


def paths() -> dict[str, Any]:
    return {
        "batch": stuck(),
        "batch['a']": {"fine": 1, "a": stuck()},
        "batch[0].value": [Slotted(stuck())],
        "batch[0].value['x'].transform[2]": [Opaque({"x": Sample(1, [1, 2, stuck()])})],
        "batch.args[1]": functools.partial(print, 1, stuck()),
        "batch.keywords['file']": functools.partial(print, file=stuck()),
    }


@pytest.mark.parametrize("path", list(paths()))
def test_the_error_names_the_place(path: str) -> None:
    value = paths()[path]
    with pytest.raises(UnpicklableError) as caught:
        through(value)
    text = str(caught.value)
    assert text.startswith(f"{path} (a builtins.function: <function stuck.<locals>.<lambda>")
    assert "cannot be pickled" in text
    assert isinstance(caught.value, pickle.PicklingError)
    assert caught.value.__cause__ is not None


class Plain(ValueError):
    pass


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class KeywordOnly(Exception):
    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.path = path


class ReduceLies(LookupError):
    """Comes out of a pickle as something else."""

    def __reduce__(self) -> Any:
        return ValueError, ("another",)


class Forgetful(Exception):
    """Its pickle is made of the arguments alone."""

    def __init__(self, text: str, level: str = "low") -> None:
        super().__init__(text)
        self.level = level

    def __str__(self) -> str:
        return f"{self.level}: {self.args[0]}"

    def __reduce__(self) -> Any:
        return Forgetful, self.args


class MuteError(ValueError):
    def __str__(self) -> str:
        raise ZeroDivisionError("in __str__")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute that is set on it: the cause and the note too."""

    code: int


class Mixin:
    pass


class Mixed(Mixin, ValueError):
    pass


def with_attributes(error: BaseException, **attributes: Any) -> BaseException:
    error.__dict__.update(attributes)
    return error


def raised(error: BaseException) -> BaseException:
    """The same, with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def carried(error: BaseException) -> BaseException:
    return load_exception(dump_exception(raised(error), worker=3))


SURVIVORS: dict[str, Callable[[], BaseException]] = {
    "OSError with two names": lambda: OSError(18, "Cross-device", "/one", None, "/two"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/some/where"),
    "attributes": lambda: with_attributes(Plain("mine"), index=3, path="x", tensor=None),
    "two arguments": lambda: TwoArguments(404, "gone"),
    "keywords only": lambda: KeywordOnly(path="/p"),
    "failing str": lambda: MuteError("quiet"),
    "lying reduce": lambda: ReduceLies("kept"),
    "forgotten attribute": lambda: with_attributes(Forgetful("kept"), index=3),
    "an empty mixin": lambda: Mixed(),
    "frozen": lambda: Frozen(4),
}


def attributes(error: BaseException) -> dict[str, Any]:
    """Without the note that says where it came from."""
    return {name: value for name, value in vars(error).items() if name != "__notes__"}


@pytest.mark.parametrize("make", SURVIVORS.values(), ids=SURVIVORS.keys())
def test_exceptions_keep_all_that_they_are_and_say_where_they_come_from(
    make: Callable[[], BaseException],
) -> None:
    error, expected = carried(make()), make()
    assert (type(error), error.args) == (type(expected), expected.args)
    if not isinstance(error, MuteError):
        assert str(error) == str(expected)
    assert attributes(error) == expected.__dict__
    for name in ("errno", "strerror", "filename", "filename2", "name", "path", "value", "start", "reason"):
        assert getattr(error, name, None) == getattr(expected, name, None)
    cause, line = error.__cause__, f"Caught {type(error).__name__} in DataLoader worker process 3."
    assert isinstance(cause, WorkerTraceback)
    assert cause.text.startswith(f"{line}\nOriginal Traceback (most")
    assert "in raised\n    raise error\n" in cause.text
    assert str(cause) == "\n" + cause.text
    if hasattr(error, "add_note") and not isinstance(error, Frozen):  # Python 3.11; torch has it in the text
        assert vars(error)["__notes__"] == [line]


def test_what_cannot_be_pickled_is_left_behind_alone() -> None:
    error = carried(with_attributes(Plain("mine"), lock=threading.Lock(), index=3, call=stuck()))
    assert (type(error), error.args, attributes(error)) == (Plain, ("mine",), {"index": 3})
    error = carried(ValueError("bad", stuck()))
    assert isinstance(error, (ValueError, RuntimeError))
    assert "bad" in str(error)


def local(*bases: type) -> Any:
    """A class that no other process can import."""
    return type("Local", bases, {"__qualname__": "local.<locals>.Local"})


def test_a_local_class_becomes_its_nearest_importable_base() -> None:
    error = carried(with_attributes(local(Plain)("mine", 3), index=7))
    assert (type(error), error.args, attributes(error)) == (Plain, ("mine", 3), {"index": 7})
    assert "Caught Local in" in str(error.__cause__)
    for arguments in ((), ("text",)):
        error = carried(local(Mixin, ValueError)(*arguments))
        assert isinstance(error, ValueError)
        assert error.args == arguments
    error = carried(local(Exception)("what happened"))
    assert type(error) is RuntimeError, "Exception itself would say less"
    assert "Local: what happened" in str(error)


def test_notes_and_groups_survive() -> None:
    error: Any = with_attributes(Plain("mine"), __notes__=["a note"])
    once = carried(error).__dict__["__notes__"]
    assert once[0] == "a note"
    assert carried(carried(error)).__dict__["__notes__"] == once, "through a second process, as by tune"
    group: Any = getattr(builtins, "ExceptionGroup", None)
    if group is None:
        pytest.skip("this Python has no exception groups")
    error = carried(group("several", [ValueError("one"), group("inner", [KeyError("two")])]))
    assert (type(error), error.message) == (group, "several")
    first, inner = error.exceptions
    assert (type(first), first.args) == (ValueError, ("one",))
    assert inner.exceptions[0].args == ("two",)


def test_a_class_that_this_process_cannot_import_becomes_a_runtime_error() -> None:
    data = dump_exception(Plain("mine"), 0)
    error = load_exception(data.replace(b"Plain", b"Plxin"))
    assert type(error) is RuntimeError
    assert "Plxin" in str(error)
    assert type(load_exception(b"no pickle at all")) is RuntimeError
