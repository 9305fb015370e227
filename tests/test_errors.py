"""The exceptions and warnings, the line that a warning names, and how texts show what users handed in."""

from __future__ import annotations

from typing import Any

import pytest

import fastq_loader
from fastq_loader import errors, statistics
from fastq_loader.errors import describe_index, locate, shorten, warn_user


def test_whatever_can_be_raised_or_warned_is_exported() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    assert kinds <= {*fastq_loader.__all__}
    assert {"WorkerReplaced", "PinFallback", "PoisonBatch"} < kinds
    public = {name for name in vars(statistics) if name.endswith("Statistics") or name == "LateBatch"}
    assert public <= {*fastq_loader.__all__}


def test_errors_are_caught_by_clauses_written_for_torch() -> None:
    for kind in (errors.WorkerDied, errors.LoaderTimeout, errors.IteratorInvalid, errors.ProtocolError):
        assert issubclass(kind, RuntimeError)
    assert issubclass(errors.PoisonBatch, errors.WorkerDied)
    for kind in (errors.WorkerReplaced, errors.PinFallback):
        assert issubclass(kind, RuntimeWarning)


def called_in(module: str) -> None:
    """Call `warn_user` three functions deep in a module of this name."""
    names: dict[str, Any] = {"__name__": module, "warn_user": warn_user}
    exec(
        'def inner(): warn_user("look", UserWarning)\ndef middle(): inner()\ndef outer(): middle()',
        names,
    )
    names["outer"]()


@pytest.mark.parametrize("module", ["fastq_loader.loader", "fastq_loader.epoch.base", "fastq_loader_extras"])
def test_a_warning_names_the_line_from_which_the_package_was_called(module: str) -> None:
    with pytest.warns(UserWarning, match="look") as caught:
        called_in(module)
    here = (__file__, called_in.__code__.co_firstlineno + 7)
    assert [(one.filename, one.lineno) for one in caught] == [("<string>", 1) if "extras" in module else here]


def test_an_error_gets_its_place_and_keeps_its_own_attributes() -> None:
    error: Any = KeyError("no such image")
    error.index = "the user's"
    locate(error, index=[3, 4], batch=1, worker=None)
    assert vars(error) == {"index": "the user's", "batch": 1, "worker": None}


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (shorten, "x", "'x'"),
        (shorten, "x" * 20, "'xxxxxx..."),
        (shorten, Unprintable(), "<repr f..."),
        (describe_index, [0, 1, 2, 3], "[0, 1, 2, 3]"),
        (describe_index, [8, 9, 10, 11, 12], "8..12"),
        (describe_index, [9, 1, 2, 3, 1 << 60], "9, 1, ... 1152921504606846976, 5 in all"),
        (describe_index, ["a"] * 3, "['a', 'a', 'a']"),
        (describe_index, Unprintable(), "<repr failed: RuntimeError>"),
    ],
)
def test_what_is_shown_of_a_value_is_short_and_of_an_index_its_ends(show: Any, value: Any, text: str) -> None:
    assert show(value, *[10] * (show is shorten)) == text
