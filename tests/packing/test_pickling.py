"""Pickling with the leaves left out, the search for what cannot be pickled, and exceptions on their way."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import UnpicklableError, WorkerTraceback
from fastq_loader.packing import pickling
from fastq_loader.packing.pickling import dump, dump_exception, load, load_exception
from tests.support.datasets import Opaque, Point, Record, Slotted, assert_same


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


@pytest.mark.parametrize(
    ("value", "is_leaf"),
    [
        (torch.rand(3), True),
        (torch.rand(3)[::2], True),
        (torch.tensor(1, dtype=torch.bfloat16), True),
        (torch.rand(3, requires_grad=True), False),
        (torch.nn.Parameter(torch.rand(3)), False),
        (torch.eye(3).to_sparse(), False),
        (torch.empty(3, device="meta"), False),
        (torch.rand(3, dtype=torch.complex64).conj(), False),
        (torch._neg_view(torch.rand(3)), False),
        (np.zeros(3), True),
        (np.zeros(3, dtype=">f4"), False),
        (np.zeros(3, dtype=object), False),
        (np.zeros(3, dtype=[("a", "i4")]), False),
        (np.ma.zeros(3), False),
        (np.float32(1), False),
        ([1], False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_leaves_are_dense_tensors_and_arrays_of_exactly_that_type(value: Any, is_leaf: bool) -> None:
    assert pickling.is_leaf(value) == is_leaf


def test_a_tensor_with_a_graph_raises_torchs_own_words() -> None:
    graph = torch.rand(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError) as theirs:
        torch.multiprocessing.reductions.reduce_tensor(graph)
    for value in (graph, [graph], Opaque({"x": graph})):
        with pytest.raises(RuntimeError) as ours:
            through(value)
        assert ours.type is RuntimeError
        assert str(ours.value) == str(theirs.value)


def test_loads_inside_a_load_have_their_own_leaves() -> None:
    inner = dump(Opaque(torch.tensor(2)), lambda leaf: 0)
    value = [Nested(inner), torch.tensor(1)]
    data = dump(value, lambda leaf: 0)
    result = load(data, [torch.tensor(1)])
    assert result[0].value.value == 2
    assert result[1] == 1


class Nested:
    """An object whose unpickling puts another batch together."""

    def __init__(self, data: bytes) -> None:
        self.value = load(data, [torch.tensor(2)])
        self.data = data

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return Nested, (self.data,)


meeting = threading.Barrier(2, timeout=10)


def meet() -> str:
    meeting.wait()
    return "met"


class Meeting:
    """Its unpickling waits until another thread is at the same point."""

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return meet, ()


def test_two_threads_load_each_their_own_leaves() -> None:
    # Two loaders, each iterated by a thread of its own: Python may switch between them at any call.
    data = dump([Meeting(), torch.zeros(1), Meeting()], lambda leaf: 0)
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        results[number] = load(data, [torch.tensor([number])])[1].item()

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: 1, 2: 2}


def test_after_a_failed_load_nothing_of_it_stays() -> None:
    data = dump([torch.rand(1), Broken()], lambda leaf: 0)
    with pytest.raises(ZeroDivisionError):
        load(data, [torch.rand(1)])
    assert not getattr(pickling._building, "leaves", ())


class Broken:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> tuple[Callable[[int, int], Any], tuple[int, int]]:
        return divmod, (1, 0)


# ---- naming what cannot be pickled ------------------------------------------------------------------


class Attribute:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.fine = 1


@dataclasses.dataclass
class Sample:
    fine: int
    transform: Any


def stuck() -> Any:
    """Something that no pickle takes."""
    return lambda: None


def paths() -> dict[str, Any]:
    return {
        "batch": stuck(),
        "batch[1]": [1, stuck()],
        "batch['a']": {"fine": 1, "a": stuck()},
        "batch[3][0]": {3: (stuck(),)},
        "batch.transform": Sample(1, stuck()),
        "batch.value": Attribute(stuck()),
        "batch[0].value['x'].transform[2]": [Attribute({"x": Sample(1, [1, 2, stuck()])})],
        "batch.y": Late(stuck()),
        "batch.func": functools.partial(stuck()),
        "batch.args[1]": functools.partial(print, 1, stuck()),
        "batch.keywords['file']": functools.partial(print, file=stuck()),
    }


class Late:
    def __init__(self, value: Any) -> None:
        self.x = torch.rand(2)
        self.y = value


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


def test_a_local_class_and_its_instances_are_named_as_a_whole() -> None:
    class Local:
        def method(self) -> None:
            """Something that a class holds and that no pickle takes."""

    for value in (Local, Local()):
        with pytest.raises(UnpicklableError) as caught:
            through({"fine": 1, "mine": value})
        assert str(caught.value).startswith("batch['mine'] (a ")


def test_values_without_parts_are_named_where_they_are() -> None:
    for value in (threading.Lock(), (number for number in range(3)), Slotted(stuck())):
        with pytest.raises(UnpicklableError, match=r"^batch\[0\] \(a "):
            through([value])


def test_a_repr_that_fails_or_is_long_does_no_harm() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise KeyError("no")

    class Long:
        def __repr__(self) -> str:
            return "x" * 10_000

    for value in (Mute(), Long()):
        with pytest.raises(UnpicklableError) as caught:
            through([value])
        assert str(caught.value).startswith("batch[0]")
        assert len(str(caught.value)) < 500


def test_a_cycle_around_what_cannot_be_pickled_ends() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle, "here": stuck()})
    with pytest.raises(UnpicklableError, match=r"^batch"):
        through(cycle)


class OnlyOnce:
    """Fails the first time that it is pickled."""

    def __init__(self) -> None:
        self.tries = 0

    def __reduce__(self) -> Any:
        self.tries += 1
        if self.tries == 1:
            raise ConnectionError("not now")
        return OnlyOnce, ()


def test_what_pickles_the_second_time_raises_its_own_error() -> None:
    with pytest.raises(ConnectionError, match="not now"):
        through([OnlyOnce()])


# ---- exceptions -------------------------------------------------------------------------------------


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

    def __str__(self) -> str:
        return f"no {self.path}"


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
    "ValueError": lambda: ValueError("bad"),
    "no arguments": lambda: ValueError(),
    "several arguments": lambda: ValueError("bad", 3, None, [1, {"a": 2}]),
    "KeyError": lambda: KeyError("key"),
    "StopIteration": lambda: StopIteration(3),
    "OSError": lambda: OSError(2, "No such file", "/some/where"),
    "OSError with two names": lambda: OSError(18, "Cross-device", "/one", None, "/two"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/some/where"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    "ImportError": lambda: ImportError("no", name="module", path="/p"),
    "Exception": lambda: Exception("itself"),
    "MemoryError": lambda: MemoryError("full"),
    "a class of its own": lambda: Plain("mine"),
    "attributes": lambda: with_attributes(Plain("mine"), index=3, path="x", tensor=None),
    "two arguments": lambda: TwoArguments(404, "gone"),
    "keywords only": lambda: KeywordOnly(path="/p"),
    "failing reduce": lambda: ReduceFails("kept"),
    "lying reduce": lambda: ReduceLies("kept"),
    "forgotten attribute": lambda: with_attributes(Forgetful("kept"), index=3),
    "forgotten value": lambda: Forgetful("kept", "high"),
    "a mixin": lambda: Mixed("kept"),
    "an empty mixin": lambda: Mixed(),
}


def attributes(error: BaseException) -> dict[str, Any]:
    """Without the note that says where it came from."""
    return {name: value for name, value in vars(error).items() if name != "__notes__"}


@pytest.mark.parametrize("make", SURVIVORS.values(), ids=SURVIVORS.keys())
def test_exceptions_keep_type_arguments_text_and_attributes(make: Callable[[], BaseException]) -> None:
    error, expected = carried(make()), make()
    assert type(error) is type(expected)
    assert error.args == expected.args
    assert str(error) == str(expected)
    assert attributes(error) == expected.__dict__
    for name in ("errno", "strerror", "filename", "filename2", "name", "path", "value", "start", "reason"):
        assert getattr(error, name, None) == getattr(expected, name, None)


@pytest.mark.parametrize("make", SURVIVORS.values(), ids=SURVIVORS.keys())
def test_the_cause_is_the_workers_traceback(make: Callable[[], BaseException]) -> None:
    error = carried(make())
    cause = error.__cause__
    assert isinstance(cause, WorkerTraceback)
    name = type(make()).__name__
    assert cause.text.startswith(f"Caught {name} in DataLoader worker process 3.\nOriginal Traceback (most")
    assert "in raised\n    raise error\n" in cause.text
    assert str(cause) == "\n" + cause.text


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters()) | st.integers() | st.binary() | st.none(), max_size=3))
def test_any_plain_arguments_survive(arguments: list[Any]) -> None:
    error = carried(Plain(*arguments))
    assert (type(error), error.args) == (Plain, tuple(arguments))


def test_arguments_that_cannot_be_compared_survive() -> None:
    for argument in (np.arange(3), torch.arange(3), [torch.zeros(2)]):
        error = carried(Plain("bad sample", argument))
        assert type(error) is Plain
        assert_same(("bad sample", argument), error.args)


def test_attributes_that_cannot_be_pickled_are_left_behind_alone() -> None:
    error = carried(with_attributes(Plain("mine"), lock=threading.Lock(), index=3, call=stuck()))
    assert type(error) is Plain
    assert error.args == ("mine",)
    assert attributes(error) == {"index": 3}


def test_tensors_in_attributes_survive() -> None:
    error = carried(with_attributes(Plain("mine"), sample=torch.arange(3)))
    assert_same(torch.arange(3), error.__dict__["sample"])


def test_arguments_that_cannot_be_pickled_leave_the_text() -> None:
    error = carried(ValueError("bad", stuck()))
    assert isinstance(error, (ValueError, RuntimeError))
    assert "bad" in str(error)


def test_a_local_class_becomes_its_nearest_importable_base() -> None:
    class Local(Plain):
        pass

    error = carried(with_attributes(Local("mine", 3), index=7))
    assert type(error) is Plain
    assert error.args == ("mine", 3)
    assert attributes(error) == {"index": 7}
    assert error.__cause__ is not None
    assert "Caught Local in" in str(error.__cause__)


def test_a_local_class_right_below_exception_becomes_a_runtime_error_that_names_it() -> None:
    class Local(Exception):
        pass

    error = carried(Local("what happened"))
    assert type(error) is RuntimeError
    assert "Local: what happened" in str(error)


@pytest.mark.parametrize("arguments", [(), ("text",)])
def test_a_local_class_with_a_mixin_becomes_an_exception(arguments: tuple[str, ...]) -> None:
    class Local(Mixin, ValueError):
        pass

    error = carried(Local(*arguments))
    assert isinstance(error, ValueError)
    assert error.args == arguments


def test_an_exception_that_cannot_be_printed_is_carried_all_the_same() -> None:
    error = carried(Mute("quiet"))
    assert isinstance(error, Exception)
    assert isinstance(error.__cause__, WorkerTraceback)
    assert "Caught Mute" in str(error.__cause__)


def test_a_chain_is_told_in_the_traceback() -> None:
    def chain() -> None:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise Plain("second") from first

    with pytest.raises(Plain) as caught:
        chain()
    error = load_exception(dump_exception(caught.value, 0))
    assert (type(error), error.args) == (Plain, ("second",))
    text = str(error.__cause__)
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("Plain: second")


def test_notes_survive() -> None:
    error = Plain("mine")
    if not hasattr(error, "add_note"):
        error.__notes__ = ["a note"]  # type: ignore[attr-defined]
    else:
        error.add_note("a note")
    assert carried(error).__dict__["__notes__"][0] == "a note"


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="Python 3.11 has notes")
@pytest.mark.parametrize("make", SURVIVORS.values(), ids=SURVIVORS.keys())
def test_a_note_says_what_torch_says_in_the_text(make: Callable[[], BaseException]) -> None:
    error = load_exception(dump_exception(raised(make()), 3))
    assert vars(error)["__notes__"] == [f"Caught {type(error).__name__} in DataLoader worker process 3."]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute that is set on it: the cause and the note too."""

    code: int


def test_an_exception_that_refuses_attributes_has_its_cause() -> None:
    error = carried(Frozen(4))
    assert (type(error), error.args) == (Frozen, (4,))
    assert isinstance(error.__cause__, WorkerTraceback)


def test_exception_groups_survive() -> None:
    group: Any = getattr(builtins, "ExceptionGroup", None)
    if group is None:
        pytest.skip("this Python has no exception groups")
    error = carried(group("several", [ValueError("one"), group("inner", [KeyError("two")])]))
    assert type(error) is group
    assert error.message == "several"
    first, inner = error.exceptions
    assert (type(first), first.args) == (ValueError, ("one",))
    assert inner.exceptions[0].args == ("two",)


def test_a_class_that_this_process_cannot_import_becomes_a_runtime_error() -> None:
    data = dump_exception(Plain("mine"), 0)
    error = load_exception(data.replace(b"Plain", b"Plxin"))
    assert type(error) is RuntimeError
    assert "Plxin" in str(error)
    assert type(load_exception(b"no pickle at all")) is RuntimeError


def test_an_exception_without_a_traceback_is_carried() -> None:
    error = load_exception(dump_exception(Plain("mine"), 5))
    assert (type(error), error.args) == (Plain, ("mine",))
    assert "worker process 5" in str(error.__cause__)


def test_dumping_leaves_the_exception_as_it_was() -> None:
    error = raised(with_attributes(Plain("mine"), index=1))
    before = error.__traceback__
    dump_exception(error, 0)
    assert (error.args, error.__dict__, error.__traceback__) == (("mine",), {"index": 1}, before)
    assert error.__cause__ is None
