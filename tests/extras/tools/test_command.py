"""The command line: what it is given, and what it says."""

from __future__ import annotations

import ast
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader, StatefulDataLoader
from fastq_loader.extras.insight.verdict import Diagnosis
from fastq_loader.extras.tools import command, doctor
from fastq_loader.extras.tools.command import WrongUse, find, main
from fastq_loader.extras.tools.comparing import Comparison, ComparisonRow
from fastq_loader.extras.tools.tuning import Tuning, TuningRow
from tests.conftest import run_script
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
        ("./my_training.py:loader", "must be MODULE:NAME, .*, and not a path"),
        ("tests:", "must be MODULE:NAME"),
        ("no_such_module:loader", "'no_such_module:loader': No module named 'no_such_module'"),
        ("tests.no_such_module:loader", "No module named 'tests.no_such_module'"),
        (f"{__name__}.py:make_loader", "is not a package; leave out '.py'"),
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


def needs(size: int) -> Any:
    return LOADER, size


def forgets() -> None: ...


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("needs", "called without arguments, and that fails: .*'size'"),
        ("forgets", "returned None in place of a loader"),
    ],
)
def test_a_function_that_makes_no_loader_is_an_error_without_a_traceback(
    name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", f"{__name__}:{name}"])
    assert re.search(text, capsys.readouterr().err)


def test_options_are_handed_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "tune", lambda loader, **options: options if loader is LOADER else "another")
    monkeypatch.setattr(command, "checked", lambda *_, **__: None)
    line = "--seconds 5 --step-seconds 0.2 --start-methods fork spawn --schedules dynamic --max-workers 3"
    assert main(["tune", f"{__name__}:make_loader", *line.split(), "--quiet"]) == 0
    options = {"seconds": 5.0, "step_seconds": 0.2, "start_methods": ["fork", "spawn"], "progress": False}
    assert ast.literal_eval(capsys.readouterr().out) == {
        **options,
        "schedules": ["dynamic"],
        "max_workers": 3,
    }


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
    out = capsys.readouterr().out
    assert all(name in out for name in ("tune", "compare", "doctor", "--version"))


def test_it_says_its_version_and_those_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    out = capsys.readouterr().out
    assert re.fullmatch(r"fastq_loader .+, torch \S+, Python 3\.\d+\.\S+\n", out)
    assert torch.__version__ in out


PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, required=True)
SIZE = parser.parse_args().size
from fastq_loader import StatefulDataLoader
from tests.support.datasets import Made

def make():
    return StatefulDataLoader(Made(float, SIZE), 4, schedule="dynamic")
"""


@pytest.fixture
def parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a loader in a module that parses arguments, and a state of it."""
    (tmp_path / "parses.py").write_text(PARSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "parses", raising=False)
    loader = StatefulDataLoader(Made(float, 8), 4, schedule="dynamic")
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    monkeypatch.chdir(tmp_path)
    return "parses:make"


def test_arguments_after_two_dashes_go_to_the_module(parses: str, capsys: pytest.CaptureFixture[str]) -> None:
    replay = ["replay", parses, "state.pt", "--batch", "1"]
    before = sys.argv
    with pytest.raises(SystemExit, match="2"):
        main(replay)
    err = capsys.readouterr().err
    assert "usage: parses [-h] --size SIZE" in err
    assert "'parses:make' has ended the program. Does it parse arguments? It gets those after --" in err
    assert main([*replay, "--", "--size", "8"]) == 0
    assert "batch: " in capsys.readouterr().out
    assert sys.argv is before


def test_a_batch_that_is_not_there_and_a_debugger_that_is_left_are_no_traceback(
    parses: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", parses, "state.pt", "--batch", "99", "--", "--size", "8"])
    assert "error: batch=99: the epoch had fewer batches" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    with pytest.raises(SystemExit, match="0"):
        main(["replay", parses, "state.pt", "--batch", "1", "--pdb", "--", "--size", "8"])
    assert "__getitem__" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("argument", ["doctor", "--help"])
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("r, w = os.pipe(); os.dup2(w, 1); os.close(r); sys.stdout = open(1, 'w')", 141),
        ("sys.stdout = None", 0),
    ],
    ids=["head -0", ">&-"],
)
def test_a_reader_that_leaves_is_no_traceback(argument: str, ending: str, code: int) -> None:
    result = run_script(
        f"""
        import os, runpy, sys

        {ending}
        sys.argv = ["fastq_loader", {argument!r}]
        runpy.run_module("fastq_loader", run_name="__main__")
        """,
        warm=True,
    )
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


class Größe(Made):
    """Its name, keys and errors are not ASCII."""

    def __getitem__(self, index: int) -> Any:
        return {"größe→": torch.ones(2), "漢": "字…"}


def large() -> Any:
    return StatefulDataLoader(Größe(float, 8), 4, schedule="round_robin")


def refused() -> Any:
    yield doctor.Finding(doctor.NOTE, "memory", "漢 → ± \udcff")


ROW = TuningRow({"num_workers": 0}, 310.5, 0.02, None, current=True)
COSTS = ComparisonRow("torch", 100, 2.0), ComparisonRow("fastq_loader", 100, 0.5)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_all_that_is_printed_can_be_written_on_any_terminal(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(doctor, "CHECKS", (refused,))
    monkeypatch.setattr(doctor, "ANYWHERE", (refused,))
    loader = large()
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "größe.pt")
    with pytest.warns(UserWarning, match="other random numbers"):
        main(["replay", f"{__name__}:large", str(tmp_path / "größe.pt"), "--batch", "1"])
    main(["doctor"])
    print(loader)
    print(loader.diagnose())
    print(Tuning(ROW.settings, (ROW,), 0.0, ("漢 failed",), loader))
    print(Comparison(False, "batch['漢→'] differs: \udcff", 1, COSTS))
    print(Diagnosis("sampler", 0.5, "Größe.漢", ("num_workers 1 → 2: about 2 ×",)))
    terminal.flush()
    written = terminal.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert ("漢" in written) == (encoding == "utf-8")
    assert "-> now" in written or encoding == "utf-8"
