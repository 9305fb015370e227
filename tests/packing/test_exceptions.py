"""Exceptions on their way: what arrives of them, whatever their classes do."""

from __future__ import annotations

import builtins
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import WorkerTraceback
from fastq_loader.packing.pickling import dump_exception, load_exception
from tests.support.datasets import assert_same


def stuck() -> Any:
    """Something that no pickle takes."""
    return lambda: None


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


class ReduceFails(LookupError):
    def __reduce__(self) -> NoReturn:
        raise ZeroDivisionError("in __reduce__")


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


class Mute(ValueError):
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
    "no arguments": lambda: ValueError(),
    "several arguments": lambda: ValueError("bad", 3, None, [1, {"a": 2}]),
    "StopIteration": lambda: StopIteration(3),
    "OSError with two names": lambda: OSError(18, "Cross-device", "/one", None, "/two"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/some/where"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    "ImportError": lambda: ImportError("no", name="module", path="/p"),
    "Exception": lambda: Exception("itself"),
    "attributes": lambda: with_attributes(Plain("mine"), index=3, path="x", tensor=None),
    "two arguments": lambda: TwoArguments(404, "gone"),
    "keywords only": lambda: KeywordOnly(path="/p"),
    "failing str": lambda: Mute("quiet"),
    "failing reduce": lambda: ReduceFails("kept"),
    "lying reduce": lambda: ReduceLies("kept"),
    "forgotten attribute": lambda: with_attributes(Forgetful("kept"), index=3),
    "forgotten value": lambda: Forgetful("kept", "high"),
    "a mixin": lambda: Mixed("kept"),
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
    if not isinstance(error, Mute):
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


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters()) | st.integers() | st.binary() | st.none(), max_size=3))
def test_any_plain_arguments_survive(arguments: list[Any]) -> None:
    error = carried(Plain(*arguments))
    assert (type(error), error.args) == (Plain, tuple(arguments))


def test_tensors_and_arrays_survive_though_they_cannot_be_compared() -> None:
    for argument in (np.arange(3), torch.arange(3), [torch.zeros(2)]):
        error = carried(with_attributes(Plain("bad sample", argument), sample=argument))
        assert type(error) is Plain
        assert_same(("bad sample", argument), error.args)
        assert_same(argument, error.__dict__["sample"])


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


def test_a_chain_is_told_in_the_traceback() -> None:
    error = Plain("second")
    error.__cause__ = raised(KeyError("first"))
    text = str(carried(error).__cause__)
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("Plain: second")


def test_notes_and_groups_survive() -> None:
    error: Any = with_attributes(Plain("mine"), __notes__=["a note"])
    assert carried(error).__dict__["__notes__"][0] == "a note"
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


def test_dumping_leaves_the_exception_as_it_was() -> None:
    error = raised(with_attributes(Plain("mine"), index=1))
    before = error.__traceback__
    dump_exception(error, 0)
    assert (error.args, error.__dict__, error.__traceback__) == (("mine",), {"index": 1}, before)
    assert error.__cause__ is None
