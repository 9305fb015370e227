"""`loader.profile()` and the command: which line is slow, wherever batches are loaded."""

from __future__ import annotations

import cProfile
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader
from fastq_loader.extras.profile.profile import Profile
from fastq_loader.extras.tools.command import main
from fastq_loader.reading import collate
from fastq_loader.statistics.counters import Counters
from tests.conftest import wait_until
from tests.support.thorough import thorough

#: The slow lines end in this mark.
LINES = Path(__file__).read_text().splitlines()


def spun(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Timed(Dataset[Any]):
    """A sample is the seconds of its slow line, and of all of it."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Sleeps(Timed):
    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        time.sleep(0.04)  # slow
        slow = time.perf_counter() - began
        time.sleep(0.004)
        return slow, time.perf_counter() - began


class Searches(Timed):
    """The search keeps the interpreter's lock."""

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        re.search(r"(a+)+c", "a" * 18)  # slow
        slow = time.perf_counter() - began
        time.sleep(slow / 8)
        return slow, time.perf_counter() - began


@pytest.mark.processes
@thorough(after=3)
@pytest.mark.parametrize("dataset", [Sleeps(), Searches()], ids=["sleep", "search"])
@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_the_slow_line_is_the_first_with_its_share(dataset: Any, workers: int, method: Any) -> None:
    loader = DataLoader(dataset, 4, num_workers=workers, multiprocessing_context=method)
    with loader.profile() as profile:
        times = torch.cat([torch.stack(batch, 1) for batch in loader])
    slow, whole = times.sum(0).tolist()
    first = profile.lines[0]
    assert LINES[first.line - 1].endswith("# slow")
    assert Path(first.file) == Path(__file__)
    # On a machine that does nothing else it is that to 5 points.
    assert first.share > slow / whole / 2
    assert sum(line.share for line in profile.lines) == pytest.approx(1)
    assert profile.seconds > whole / 2
    assert len(str(profile).splitlines()) <= 20
    assert max(map(len, str(profile).splitlines())) <= 80


class Spins(Timed):
    """A sample is the seconds in Python code, and all."""

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        time.sleep(0.02)
        slept = time.perf_counter()
        spun(0.02)
        return time.perf_counter() - slept, time.perf_counter() - began


def test_python_code_is_sampled_where_no_other_thread_gets_the_interpreter() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5)
    try:
        loader = DataLoader(Spins(), 4)
        with loader.profile() as profile:
            times = torch.cat([torch.stack(batch, 1) for batch in loader])
    finally:
        sys.setswitchinterval(interval)
    python, whole = times.sum(0).tolist()
    assert sum(line.share for line in profile.lines if line.function == "spun") > python / whole / 2
    assert round(profile.seconds * 1e9) % 4_000_000 == 0, "a late sample has time of the next line"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_sampled_but_the_epochs_that_begin_in_the_block(workers: int) -> None:
    persistent, interval = workers > 0, sys.getswitchinterval()
    dataset = Threads()
    loader = DataLoader(dataset, 1, num_workers=workers, persistent_workers=persistent)
    before, _ = list(loader), loader.statistics()
    with loader.profile() as profile:
        during = list(loader)
        assert profile.seconds > 0
        with pytest.raises(RuntimeError, match="this loader is being profiled already"), loader.profile():
            pass
    dataset.is_over.fill_(1)
    seconds, after = profile.seconds, list(loader)
    assert [sum(map(int, each)) for each in (before, during, after)] == [0, 8, 0]
    assert profile.seconds == seconds
    assert sys.getswitchinterval() == interval
    loader.close()


class Threads(Timed):
    """A sample: how many threads of the profile there are."""

    def __init__(self) -> None:
        super().__init__(8)
        self.is_over = torch.zeros(1).share_memory_()  # then one that ends is waited for

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        wait_until(lambda: not self.is_over or not self.count(), 60)
        return self.count()

    def count(self) -> int:
        return [thread.name for thread in threading.enumerate()].count("fastq_profile")


class Profiled(Timed):
    """Is profiled by the user, too, who sees this package's sampler."""

    def __getitem__(self, index: int) -> int:
        with cProfile.Profile() as own:
            time.sleep(0.01)
        return sum(entry.callcount for entry in own.getstats() if "sleep" in str(entry.code))  # type: ignore[attr-defined]


def test_the_users_own_profiler_goes_on() -> None:
    loader = DataLoader(Profiled(), 4)
    alone = torch.cat(list(loader))
    for _ in range(2):  # each block is a profile of its own
        with loader.profile() as profile:
            assert torch.cat(list(loader)).equal(alone)
        assert profile.lines[0].function.endswith("__getitem__")


def test_a_sample_belongs_to_the_innermost_line_of_the_user() -> None:
    profile, library = Profile(Counters()), "/venv/lib/python3.12/site-packages/PIL/Image.py"
    user, helper = ("D.__getitem__", "/home/me/data.py", 3, 5), ("crop", "/home/me/crops.py", 1, 2)
    profile.add({(user, ("open", library, 10, 12), ("read", library, 20, 21)): 5.0, (user, helper): 2.0})
    profile.add({(user,): 1.0, (("collate", library, 1, 3), ("stack", library, 7, 8)): 2.0})
    line, *others = profile.lines
    assert (line.function, line.line, line.share) == ("D.__getitem__", 5, 0.6)
    assert [(each.function, each.share) for each in line.below] == [("open", 0.5)]
    assert [(each.function, each.share) for each in others] == [("crop", 0.2), ("collate", 0.2)]
    page = str(profile).splitlines()
    assert page[2:5] == [
        " 60.0%  D.__getitem__ (data.py:5)",
        " 50.0%      open (PIL/Image.py)",
        " 20.0%  crop (crops.py:2)",
    ]
    profile = Profile(Counters())
    profile.add({(): 1.0, (("stack_tensors", collate.__file__, 1, 2),): 1.0})
    assert str(profile).endswith("\n\n100.0%  collating, and other work (fastq_loader)")


def make_torchs() -> Any:
    return torch.utils.data.DataLoader(Sleeps(), 4, num_workers=1)


@pytest.mark.processes
def test_the_command_takes_torchs_loader_and_writes_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{__name__}:make_torchs"
    assert main(["profile", name, "--batches", "3"]) == 0
    note, _, head, *_ = capsys.readouterr().out.splitlines()
    assert note == "This is torch's DataLoader: fastq_loader's is in its place here, with the same arguments."
    assert re.match(r"Loading took \d\S* s, added up over workers", head)
    with pytest.raises(SystemExit, match="2"):
        main(["profile", name, "--batches", "0"])
    pytest.importorskip("pyinstrument")
    page, graph = tmp_path / "calls.html", tmp_path / "calls.json"
    assert main(["profile", name, "--batches", "3", "--html", str(page), "--speedscope", str(graph)]) == 0
    assert "Sleeps.__getitem__" in page.read_text()
    assert "Sleeps.__getitem__" in str(json.loads(graph.read_text())["shared"])
    with pytest.raises(SystemExit, match="2"):
        main(["profile", name, "--html", "/nonexistent/b.html"])
    assert "No such file or directory: '/nonexistent/b.html'" in capsys.readouterr().err


class Broken(Sleeps):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index < 8 else 1 / 0


BROKEN, EMPTY = DataLoader(Broken(), 4), DataLoader([], 4)


def test_the_command_shows_what_came_before_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["profile", f"{__name__}:BROKEN"])
    assert "Sleeps.__getitem__ (" in capsys.readouterr().out
    assert main(["profile", f"{__name__}:EMPTY"]) == 0
    assert capsys.readouterr().out == "Nothing was sampled: no batch was loaded.\n"


def test_pages_without_their_library_are_an_error_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyinstrument", None)
    with pytest.raises(SystemExit, match="2"):
        main(["profile", f"{__name__}:make_torchs", "--html", "calls.html"])
    assert "pip install 'fastq-loader[profile]'" in capsys.readouterr().err
