"""`tune`: its arguments, and what it makes of trials that are made up."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data

from fastq_loader import DataLoader, Dynamic, Tuning, tune
from fastq_loader.insight import machine, trials, tuning
from fastq_loader.insight.model import Costs, Setting, seconds_per_batch
from fastq_loader.insight.search import Candidate, Limits, Measured
from fastq_loader.memory import arena
from fastq_loader.workers.kinds import Auto
from tests.support.datasets import Made, Stream

# torch's, which counts the CPUs of the machine that the tests run on.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COSTS = Costs((0.05,), pack=0.0001, overhead=0.0001)
EIGHT = Made(float, 8)


class Clock:
    """Passes when something is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Trials:
    """Stands for `trials`: measures what the model says."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: set[float] = set()
        self.raises: Callable[[Candidate], BaseException | None] = lambda candidate: None

    def measure(
        self, loader: Any, candidate: Candidate, step: float, seconds: float, patience: float
    ) -> Measured:
        self.clock.now += seconds
        self.steps.add(step)
        if (error := self.raises(candidate)) is not None:
            raise error
        costs = COSTS.with_step(step)
        return Measured(seconds / seconds_per_batch(costs, candidate.setting, 4.0), seconds, costs)

    like = staticmethod(trials.like)
    start_method = staticmethod(trials.start_method)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Trials:
    clock = Clock()
    fake = Trials(clock)
    monkeypatch.setattr(tuning, "trials", fake)
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(machine, "cpus", lambda: 4.0)
    return fake


def loader_of(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(EIGHT, 2, **arguments)


# ---- what it finds -----------------------------------------------------------------------------------


def test_it_recommends_a_setting_and_gives_a_loader_with_it(fake: Trials) -> None:
    loader = loader_of(num_workers=1, shuffle=True)
    found = tune(loader, progress=False)
    assert found.settings == {"num_workers": 4, "prefetch_factor": 2, "schedule": "round_robin"}
    assert found.rows[0].settings == found.settings
    assert found.loader is not loader
    assert (found.loader.num_workers, found.loader.prefetch_factor) == (4, 2)
    assert found.loader.sampler is loader.sampler
    assert (loader.num_workers, loader.prefetch_factor) == (1, 2)
    assert [row.current for row in found.rows].count(True) == 1
    assert [row.batches_per_second for row in found.rows[1:]] == sorted(
        (row.batches_per_second for row in found.rows[1:]), reverse=True
    )


def test_the_settings_are_arguments_of_the_constructor(fake: Trials) -> None:
    found = tune(loader_of(num_workers=1), progress=False)
    for row in found.rows:
        DataLoader(EIGHT, 2, **row.settings)


def test_the_table_has_the_recommended_line_first(fake: Trials) -> None:
    found = tune(loader_of(num_workers=1), progress=False)
    head, empty, names, first, *others = str(found).splitlines()
    assert head.startswith(
        "Recommended: num_workers=4, prefetch_factor=2, schedule='round_robin' (4 times the"
    )
    assert empty == ""
    assert names.split()[:3] == ["num_workers", "prefetch_factor", "schedule"]
    assert first.split()[:4] == ["→", "4", "2", "round_robin"]
    assert [line.startswith("now") for line in others].count(True) == 1
    assert "random numbers of the batches are others" in others[-1]
    assert found._repr_html_() == f"<pre>{str(found).replace(chr(39), '&#x27;')}</pre>"


def test_a_setting_that_is_the_best_stays_as_it_is(fake: Trials) -> None:
    found = tune(
        loader_of(num_workers=4, prefetch_factor=1), 0.001, schedules=["round_robin"], progress=False
    )
    assert "(as it is), with a step of 1 ms." in str(found)
    assert "→ now" in str(found)
    assert not found.notes


def test_what_failed_is_told(fake: Trials) -> None:
    fake.raises = lambda candidate: OSError("no room") if candidate.setting.num_workers == 4 else None
    found = tune(loader_of(num_workers=1), progress=False)
    failed = [row for row in found.rows if row.error is not None]
    assert {row.settings["num_workers"] for row in failed} == {4}
    assert found.settings["num_workers"] != 4
    assert "num_workers=4 failed: OSError('no room')" in str(found)
    assert "failed" in str(found).splitlines()[-len(found.notes) - 2]


def test_if_all_fail_the_error_is_raised(fake: Trials) -> None:
    fake.raises = lambda candidate: KeyError("sample 3")
    with pytest.raises(KeyError, match="sample 3"):
        tune(loader_of(num_workers=1), progress=False)


def test_the_step_is_that_of_the_loaders_own_epochs(fake: Trials) -> None:
    loader = loader_of()
    tune(loader, progress=False)
    assert fake.steps == {0.0}
    for _ in loader:
        """A step."""
    fake.steps.clear()
    found = tune(loader, progress=False)
    total = loader.statistics().total
    assert fake.steps == {found.step_seconds} == {total.consumer_seconds / 4}
    fake.steps.clear()
    tune(loader, 0.5, progress=False)
    assert fake.steps == {0.5}


def test_a_chosen_number_is_a_number_from_here_on(fake: Trials) -> None:
    loader = loader_of(num_workers="auto", schedule="dynamic")
    loader.num_workers = Auto(4)
    found = tune(loader, progress=False)
    assert type(found.loader.num_workers) is int
    assert all(type(row.settings["num_workers"]) is int for row in found.rows)


def test_what_may_be_tried(fake: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Candidate, Limits]] = []
    search = tuning.Search

    def noted(own: Candidate, limits: Limits, *others: Any) -> Any:
        seen.append((own, limits))
        return search(own, limits, *others)

    monkeypatch.setattr(tuning, "Search", noted)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(machine, "ranks", lambda: 2)
    tune(loader_of(schedule=Dynamic(window=5)), progress=False)
    assert seen.pop() == (Candidate(Setting(0, 2, True)), Limits(4.0, 400.0))
    tune(
        loader_of(num_workers=2, prefetch_factor=3, multiprocessing_context="spawn"),
        start_methods=["fork", "spawn"],
        schedules=("dynamic",),
        max_workers=3,
        progress=False,
    )
    own, limits = seen.pop()
    assert own == Candidate(Setting(2, 3), "spawn")
    assert limits == Limits(4.0, 400.0, 3, (True,), ("fork", "spawn"))
    tune(DataLoader(Stream("tensors", [8])), progress=False)
    assert seen.pop()[1].schedules == (False,)


# ---- interrupts --------------------------------------------------------------------------------------


def interrupted_after(fake: Trials, count: int) -> Tuning:
    left = iter([None] * count)
    fake.raises = lambda candidate: next(left, KeyboardInterrupt())
    return tune(loader_of(num_workers=1), progress=False)


def test_an_interrupt_gives_what_was_measured(fake: Trials) -> None:
    found = interrupted_after(fake, 3)
    assert "It was interrupted" in str(found)
    assert len([row for row in found.rows if row.batches_per_second]) <= 3
    assert " - " in str(found), "what was not measured is not told to have failed"
    assert "failed" not in str(found)


def test_an_interrupt_before_anything_was_measured_is_raised(fake: Trials) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(fake, 0)


# ---- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seconds": "30"}, r"seconds='30' must be a number of seconds"),
        ({"seconds": 0}, r"seconds=0 must be 1 seconds or more"),
        ({"seconds": math.inf}, r"seconds=inf must be 1 seconds or more"),
        ({"seconds": True}, r"seconds=True must be a number of seconds"),
        ({"step_seconds": -0.1}, r"step_seconds=-0.1 must be 0 seconds or more"),
        ({"step_seconds": math.nan}, r"step_seconds=nan must be 0 seconds or more"),
        ({"max_workers": -1}, r"max_workers=-1 must be a number of workers, 0 or more, or None"),
        ({"max_workers": 1.5}, r"max_workers=1.5 must be a number of workers"),
        ({"start_methods": "fork"}, r"start_methods='fork' must be a collection.*\('fork',\)"),
        ({"start_methods": ["thread"]}, r"start_methods=\['thread'\] is not possible here: use some of fork"),
        ({"schedules": []}, r"schedules=\[\] is not possible here: use some of round_robin, dynamic"),
    ],
)
def test_bad_arguments_are_named(fake: Trials, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        tune(loader_of(), **arguments)
    assert not fake.steps


def test_an_iterable_dataset_keeps_its_schedule(fake: Trials) -> None:
    with pytest.raises(
        ValueError, match=r"schedules=\['dynamic'\] is not possible here: use some of round_robin"
    ):
        tune(DataLoader(Stream("tensors", [8])), schedules=["dynamic"])


@pytest.mark.parametrize("loader", [torch.utils.data.DataLoader(EIGHT), DataLoader, None])
def test_only_loaders_of_ours_can_be_tuned(loader: Any) -> None:
    with pytest.raises(TypeError, match=r"loader is a .*: tune needs a fastq_loader.DataLoader"):
        tune(loader)


def test_a_system_without_workers_has_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "AVAILABLE", False)
    with pytest.raises(RuntimeError, match="num_workers=0 is the only setting"):
        tune(loader_of())


# ---- progress ----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_goes_away(fake: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    tune(loader_of(num_workers=1))
    text = terminal.getvalue()
    assert "\n" not in text
    assert text.startswith("\rtune: 0 of 30 s: 1 workers, prefetch_factor=2, round_robin\x1b[K")
    assert text.endswith("\r\x1b[K")


def test_elsewhere_there_are_a_few_lines(fake: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    tune(loader_of(num_workers=1))
    out, err = capsys.readouterr()
    assert out == ""
    assert 3 <= len(err.splitlines()) <= 11
    assert all(line.startswith("tune: ") for line in err.splitlines())
    tune(loader_of(num_workers=1), progress=False)
    assert capsys.readouterr() == ("", "")


def test_nowhere_to_tell_it_is_no_reason_to_fail(fake: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    tune(loader_of())
    closed = io.StringIO()
    closed.isatty = lambda: False  # type: ignore[method-assign]
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    tune(loader_of())
