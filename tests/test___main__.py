"""The command line: what it is given, and what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader
from fastq_loader import __main__ as command
from fastq_loader.__main__ import WrongUse, find, main
from tests.support.datasets import Made

LOADER = object()


def make_loader() -> Any:
    return LOADER


class Loaders:
    made = staticmethod(make_loader)


@pytest.mark.parametrize(
    ("name", "found"), [("make_loader", make_loader), ("LOADER", LOADER), ("Loaders.made", make_loader)]
)
def test_a_name_leads_to_a_loader_or_to_what_makes_one(name: str, found: Any) -> None:
    assert find(f"{__name__}:{name}") is found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my_training", "'my_training' must be MODULE:NAME, as in my_training.data:make_loader"),
        (":loader", "must be MODULE:NAME"),
        ("tests:", "must be MODULE:NAME"),
        ("no_such_module:loader", "'no_such_module:loader': No module named 'no_such_module'"),
        ("tests.no_such_module:loader", "No module named 'tests.no_such_module'"),
        (f"{__name__}:nothing", f"module '{__name__}' has no attribute 'nothing'"),
        (f"{__name__}:Loaders.nothing", "'Loaders' has no attribute 'nothing'"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_that_says_it(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WrongUse, match=text):
        find(name)
    with pytest.raises(SystemExit, match="2"):
        main(["tune", name])
    assert name.partition(":")[0] in capsys.readouterr().err


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def tune(*arguments: Any, **options: Any) -> str:
        calls.append((*arguments, options))
        return "a table"

    monkeypatch.setattr(command, "tune", tune)
    monkeypatch.setattr(command, "checked", lambda *_, **__: None)
    return calls


def test_options_are_handed_on(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:make_loader"
    assert main(["tune", name]) == 0
    options: dict[str, Any] = dict.fromkeys(("start_methods", "schedules", "max_workers"))
    options |= {"seconds": 30, "step_seconds": 0.0, "progress": True}
    assert calls.pop() == (LOADER, options)
    line = "--seconds 5 --step-seconds 0.2 --start-methods fork spawn --schedules dynamic --max-workers 3"
    assert main(["tune", name, *line.split(), "--quiet"]) == 0
    options = {
        "seconds": 5.0,
        "step_seconds": 0.2,
        "start_methods": ["fork", "spawn"],
        "schedules": ["dynamic"],
        "max_workers": 3,
        "progress": False,
    }
    assert calls.pop() == (LOADER, options)
    assert main(["tune", f"{__name__}:LOADER", "--quiet"]) == 0
    assert calls.pop()[0] is LOADER
    assert capsys.readouterr().out == "a table\n" * 3


def broken() -> Any:
    raise TypeError("of the user's")


def test_bad_options_are_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        ([f"{__name__}:LOADER"], "tune needs a fastq_loader.DataLoader"),
        ([f"{__name__}:made_of_eight", "--seconds", "-1"], "seconds=-1.0 must be 1 seconds or more"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["tune", *arguments])
        assert text in capsys.readouterr().err


def made_of_eight() -> Any:
    return DataLoader(Made(float, 8))


def test_without_a_command_it_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert all(name in out for name in ("tune", "compare", "doctor", "--version"))
    assert err == ""


def test_it_says_its_version_and_those_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    out = capsys.readouterr().out
    assert re.fullmatch(r"fastq_loader .+, torch \S+, Python 3\.\d+\.\S+\n", out)
    assert torch.__version__ in out
