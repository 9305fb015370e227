"""The axis of the schedule: cases, figures, tables, pictures; and runs of a fraction of a second."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the bench extra is not installed")

from rich.console import Console

from bench import costs, files, goals, plots, readme, report, timeline
from bench.arguments import parse
from bench.cases import VARIANTS, Case, bound, cases
from bench.costs import Step, TracedSamples
from bench.jobs import Files, jobs
from bench.kills import Setting, _moments, measure_kills
from bench.results import (
    BOUND,
    Contender,
    Epoch,
    Goal,
    KillsResult,
    Results,
    ScheduleResult,
    Spread,
    Timeline,
    Work,
)
from bench.schedule import Lane, Order, measure_schedule, timeline_of
from tests.support import bench_example

PNG = b"\x89PNG\r\n\x1a\n"
EMPTY_README = "<!-- bench:begin -->\n<!-- bench:end -->\n"


def epochs(*seconds: float, ours: bool = True) -> list[Epoch]:
    inside: dict[str, Any] = {"head_of_line": 0.5, "window": 16} if ours else {}
    return [Epoch(each, each / 2, 3.6, **inside) for each in seconds]


def a_timeline() -> Timeline:
    """Two workers; batch 0 is slow, and the others wait for it."""
    work = [Work(0, 0, 0.0, 0.8), *(Work(batch, 1, 0.1 * batch, 0.1 * batch + 0.1) for batch in range(1, 7))]
    return Timeline(work, [0.8, 0.81, 0.82, 0.83, 0.84, 0.85, 0.86])


def a_case() -> ScheduleResult:
    return ScheduleResult(
        case="stalls",
        description="some batches",
        batches=7,
        num_workers=2,
        start_method="fork",
        bound=1.0,
        bounded_by="sum of costs / 2",
        list_schedule=1.05,
        goal=Goal("dynamic", 1.2, BOUND),
        contenders={
            "torch": Contender("torch", epochs(2.4, 2.2, 2.0, ours=False), a_timeline()),
            "dynamic": Contender("ours, dynamic", epochs(1.1, 1.0, 1.15), a_timeline()),
            "round_robin": Contender("ours, round_robin", failure="no\nsuch argument"),
        },
    )


def kills() -> KillsResult:
    return KillsResult(
        "a batch", 100, 0.03, 1, "fork", [0.05, 0.04, 0.06], [3.0, 3.1, 3.0], [3.5, 3.8, 3.6], [10, 10, 10]
    )


def rendered(table: Any) -> str:
    written = io.StringIO()
    Console(width=200, file=written).print(table)
    return written.getvalue()


# ---- costs --------------------------------------------------------------------------------------


def test_the_ideal_is_every_worker_busy_all_the_time() -> None:
    stalls = costs.every(8, 0.24, 0.03, 64)
    assert stalls[:9] == [0.24, *[0.03] * 7, 0.24]
    assert costs.ideal(stalls, 4) == pytest.approx(0.9)
    assert costs.list_schedule(stalls, 4) == pytest.approx(0.99)  # the 1.10 x of the goals' table


def test_no_batch_is_divided() -> None:
    assert costs.ideal([1.0, 0.1, 0.1], 4) == 1.0


def test_a_list_schedule_gives_the_next_batch_to_who_is_free_first() -> None:
    assert costs.list_schedule([3, 1, 1, 1, 2], 2) == 5
    assert costs.list_schedule([1, 1, 1], 1) == 3


def test_a_list_schedule_goes_on_while_the_consumer_is_busy() -> None:
    assert costs.list_schedule([1, 1, 1, 1], 1, Step(10, 2)) == 2 + 10 + 10
    assert costs.list_schedule([1, 1, 1], 1, Step(10, 2)) == 2 + 10
    assert costs.list_schedule([5, 1, 1, 1], 2, Step(1, 1)) == 5 + 4  # in order


def test_batches_cost_what_their_samples_cost() -> None:
    assert costs.of_batches([1, 2, 3, 4, 5], 2) == [3, 7, 5]


def test_log_normal_costs_are_the_same_in_every_run() -> None:
    drawn = costs.log_normal(0.01, 1.0, 1000)
    assert drawn == costs.log_normal(0.01, 1.0, 1000)
    assert sorted(drawn)[500] == pytest.approx(0.01, rel=0.1)


def test_a_sample_tells_who_made_it_and_when() -> None:
    index, worker, start, end = TracedSamples([0.0, 0.002])[1].tolist()
    assert (index, worker) == (1, -1)
    assert end - start >= 0.002


# ---- cases --------------------------------------------------------------------------------------


def test_cases_name_contenders_that_there_are() -> None:
    all_cases = cases()
    assert len({case.name for case in all_cases}) == len(all_cases)
    for case in all_cases:
        assert set(case.contenders) <= set(VARIANTS)
        assert case.goal.of in case.contenders
        assert case.goal.base in (*case.contenders, BOUND)
        dataset: Any = case.build()
        assert len(dataset) >= case.samples
        assert case.samples % case.batch_size == 0
        seconds, _, _ = bound(case, dataset)
        assert (seconds is not None) == isinstance(dataset, TracedSamples)
        assert seconds is not None or case.goal.base != BOUND


def test_steps_are_a_bound_too() -> None:
    case = Case("", "", _instant, 64, 1, 4, (), Goal("dynamic", 1, BOUND))
    dataset = TracedSamples([0.1] * 64)
    assert bound(case, dataset) == (pytest.approx(1.6), "sum of costs / 4", pytest.approx(1.6))
    # The first step waits for its batches, and the last one follows all of them.
    for every, seconds, listed in ((8, 8 * 0.5, 0.2 + 8 * 0.5), (32, 1.6, 1.6 + 0.5)):
        stepping = replace(case, step=Step(0.5, every))
        assert bound(stepping, dataset) == (
            pytest.approx(seconds),
            "max(steps, sum of costs / 4)",
            pytest.approx(listed),
        )


def test_an_order_is_as_long_as_it_is_told() -> None:
    order = Order()
    for samples in (3, 1):
        order.samples = samples
        assert (list(order), len(order)) == (list(range(samples)), samples)


def test_a_timeline_is_by_batch_and_from_the_start_of_the_clock() -> None:
    batches = [
        torch.tensor([[2, 1, 10.5, 10.6], [3, 1, 10.6, 10.75]], dtype=torch.float64),
        torch.tensor([[0, 0, 10.0, 10.1], [1, 0, 10.1, 11.0]], dtype=torch.float64),
    ]
    line = timeline_of(batches, [0.8, 1.0], began=10.0)
    assert [(work.batch, work.worker) for work in line.work] == [(0, 0), (1, 1)]
    assert (line.work[1].start, line.work[1].end) == (pytest.approx(0.5), pytest.approx(0.75))
    assert line.deliveries == [0.8, 1.0]


def test_kills_are_spread_over_the_epoch_and_the_same_in_every_run() -> None:
    moments = _moments(random.Random(0), 4, 2.0)
    assert moments == _moments(random.Random(0), 4, 2.0)
    assert [int(moment / 0.5) for moment in moments] == [0, 1, 2, 3]


# ---- the command line and files -----------------------------------------------------------------


def test_the_axis_runs_when_it_is_asked_for() -> None:
    assert "schedule" not in parse([]).axes
    assert "schedule" in parse(["--full"]).axes


def test_what_a_resumed_run_has_is_not_measured_again(tmp_path: Path) -> None:
    options = parse(["--axis", "schedule"])
    everything = [job.title for job in jobs(options, Files(tmp_path), Results({}, {}))]
    begun = Results({}, {}, schedule=[a_case()], kills=[kills()])
    left = [job.title for job in jobs(options, Files(tmp_path), begun)]
    assert len(everything) == len(cases()) + 2
    assert sorted(set(everything) - set(left)) == ["kills, 1 worker", "stalls, 4 workers"]
    elsewhere = parse(["--axis", "schedule", "--start-method", "spawn"])
    assert [job.title for job in jobs(elsewhere, Files(tmp_path), begun)] == everything


def test_only_peers_that_are_asked_for_contend(tmp_path: Path) -> None:
    options = parse(["--axis", "schedule", "--peers", "torch,grain"])
    titles = [job.title for job in jobs(options, Files(tmp_path), Results({}, {}))]
    assert titles
    assert not [title for title in titles if title.startswith(("kills", "rows"))]
    nobody = parse(["--axis", "schedule", "--peers", "grain"])
    assert not list(jobs(nobody, Files(tmp_path), Results({}, {})))


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    written = Results({}, {"cpu": "a"}, schedule=[a_case()], kills=[kills(), KillsResult("", 1, 0.1, 1, "")])
    files.write(tmp_path / "results.json", written)
    assert files.read(tmp_path / "results.json") == written


def test_a_file_from_before_there_was_this_axis_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"version": 2, "arguments": {}, "machine": {}, "turns": []}')
    assert files.read(path) == Results({}, {})


# ---- figures ------------------------------------------------------------------------------------


def test_times_are_of_the_bound_or_of_the_same_round() -> None:
    result = a_case()
    assert goals.times_of(result, "dynamic", BOUND) == Spread(1.1, 1.0, 1.15)
    assert goals.times_of(result, "torch", "dynamic") == Spread(
        pytest.approx(2.0), pytest.approx(2.0 / 1.15), pytest.approx(2.2)
    )
    assert goals.times_of(result, "round_robin", BOUND) is None
    assert goals.times_of(result, "dynamic", "nobody") is None
    assert goals.times_of(replace(result, bound=None), "dynamic", BOUND) is None


def test_a_kill_costs_what_its_round_took_longer() -> None:
    assert goals.seconds_per_kill(kills()) == Spread(
        pytest.approx(0.06), pytest.approx(0.05), pytest.approx(0.07)
    )
    assert goals.kill_bound(kills()) == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        (Spread(1.1, 1.0, 1.2), "met"),
        (Spread(1.1, 1.0, 1.3), "met, within noise"),
        (Spread(1.25, 1.1, 1.3), "missed, within noise"),
        (Spread(1.25, 1.21, 1.3), "missed"),
    ],
)
def test_verdicts(figure: Spread, said: str) -> None:
    assert goals.verdict(figure, 1.2) == said


# ---- reports ------------------------------------------------------------------------------------


def test_a_case_is_shown_with_its_bound_and_its_goal() -> None:
    text = rendered(report.table(a_case()))
    assert "goal: ours, dynamic takes at most 1.2 x sum of costs / 2: met\n" in text
    assert "bound: sum of costs / 2" in text
    (dynamic,) = [line for line in text.splitlines() if line.strip().startswith("ours, dynamic")]
    assert "1.10 (1.00-1.15)" in dynamic
    assert "ours, round_robin: not measured: no" in text
    assert "list schedule" in text


def test_a_case_whose_base_is_not_there_is_shown() -> None:
    result = replace(a_case(), goal=Goal("dynamic", 1.15, "torch_unordered"), bound=None)
    assert "at most 1.15 x torch_unordered: not measured" in rendered(report.table(result))


def test_kills_are_shown() -> None:
    text = rendered(report.table(kills()))
    assert "60 (50-70)" in text
    assert "met" in text
    assert "not measured: why" in rendered(report.table(KillsResult("", 1, 0.1, 1, "fork", failure="why")))


def test_moments_wait_for_the_end() -> None:
    assert report.table(bench_example.moment()) is None


def a_run() -> Results:
    run = bench_example.run()
    run.schedule.append(a_case())
    run.kills.extend([kills(), replace(kills(), failure="it\nfailed")])
    return run


def test_the_readme_has_a_row_for_every_contender_and_every_goal() -> None:
    text = readme.rewritten(EMPTY_README, a_run(), "bench/results/here.json")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    by_loader = {row[1]: row for row in rows if len(row) == 7}
    first = by_loader["bound: sum of costs / 2"]
    assert first[0] == "**stalls**: some batches; 2 workers, fork"
    assert by_loader["list schedule, computed"][2:4] == ["1.05", "1.05"]
    assert by_loader["torch"][2:] == ["2.20 (2.00-2.40)", "2.20 (2.00-2.40)", "", "", ""]
    assert by_loader["ours, dynamic"][3:] == [
        *("1.10 (1.00-1.15)", "", "0.50"),
        "at most 1.2 x sum of costs / 2: met",
    ]
    assert by_loader["ours, round_robin"][2:] == [readme.NONE, "", "", "", ""]
    assert "- ours, round_robin: not measured, no such argument (stalls)" in text
    assert "| 10 | 60 (50-70) | 80 | met |" in text
    assert "| not measured: it failed |" in text
    assert "(bench/results/here/timeline-stalls.png)" in text


# ---- pictures -----------------------------------------------------------------------------------


def test_slow_batches_are_found_from_what_they_took() -> None:
    assert timeline.slow_batches(a_timeline().work) == {0}


def test_deliveries_that_cannot_be_told_apart_are_counted() -> None:
    assert timeline.together([0.1, 0.5, 0.52, 0.54, 1.0], 0.03) == [(0.1, 1), (0.54, 3), (1.0, 1)]


def test_there_is_a_picture_where_there_is_a_timeline() -> None:
    plain = replace(a_case(), contenders={"dynamic": Contender("dynamic", epochs(1))})
    assert timeline.pictures([plain]) == []
    (picture,) = timeline.pictures([plain, a_case()])
    assert picture.name == "timeline-stalls.png"


def test_the_timeline_is_drawn_and_again_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = replace(bench_example.run(), workloads=[], by_bytes=[], by_workers=[], schedule=[a_case()])
    (path,) = plots.write(run, tmp_path / "first")
    (again,) = plots.write(run, tmp_path / "second")
    assert path.read_bytes().startswith(PNG)
    assert path.read_bytes() == again.read_bytes()


# ---- runs ---------------------------------------------------------------------------------------


def _instant() -> TracedSamples:
    return TracedSamples([0.0] * 24)


SMALL = Case(
    "small", "", _instant, 24, 2, 2, ("torch", "torch_unordered", "dynamic"), Goal("dynamic", 1, BOUND)
)


@pytest.mark.processes
def test_contenders_take_turns_over_the_same_batches() -> None:
    ticks: list[str] = []
    case = replace(SMALL, step=Step(0.001, 4), picture=True)
    result = measure_schedule(case, ("torch", "dynamic"), "fork", 2, ticks.append)
    labels = [VARIANTS[name].label for name in ("torch", "dynamic")]
    assert ticks == [*labels, *reversed(labels)]
    for name in ("torch", "dynamic"):
        contender = result.contenders[name]
        assert contender.failure is None
        assert len(contender.epochs) == 2
        for epoch in contender.epochs:
            assert epoch.seconds > epoch.waited
            assert epoch.seconds > 3 * 0.001  # the steps
            assert (epoch.window is None) == (name == "torch")
        assert contender.timeline is not None
        assert [work.batch for work in contender.timeline.work] == list(range(12))
        assert {work.worker for work in contender.timeline.work} <= {0, 1}
        assert len(contender.timeline.deliveries) == 12


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([*range(2, 24), 0, 1], "another order"),
        ([0, 1, *range(22)], "came twice"),
        (list(range(22)), "gave 11 of 12 batches"),
    ],
)
def test_wrong_batches_are_no_figures(wrong: list[int], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Order, "__iter__", lambda order: iter(wrong))
    result = measure_schedule(SMALL, ("dynamic", "torch_unordered"), "fork", 1, lambda label: None)
    assert said in str(result.contenders["dynamic"].failure)
    unordered = result.contenders["torch_unordered"].failure
    assert unordered is None if said == "another order" else said in str(unordered)


@pytest.mark.processes
def test_a_contender_that_cannot_start_does_not_end_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = Lane.warm_up

    def failing(lane: Lane) -> None:
        if lane._variant.peer == "torch":
            raise ValueError("no")
        warm_up(lane)

    monkeypatch.setattr(Lane, "warm_up", failing)
    result = measure_schedule(SMALL, ("torch", "dynamic"), "fork", 1, lambda label: None)
    assert result.contenders["torch"].failure == "ValueError: no"
    assert len(result.contenders["dynamic"].epochs) == 1


@pytest.mark.processes
def test_workers_are_killed_and_replaced() -> None:
    ticks: list[str] = []
    setting = Setting(workers=2, kills=2, start_method="fork", batch_s=0.005, per_worker=40)
    result = measure_kills(setting, 1, ticks.append)
    assert result.failure is None
    assert ticks == ["undisturbed", "killed", "start"]
    assert (len(result.undisturbed), len(result.killed), len(result.start)) == (1, 1, 1)
    assert 1 <= result.kills[0] <= 2


@pytest.mark.processes
def test_kills_that_fail_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kills.RESTARTS", -1)
    result = measure_kills(Setting(1, 1, "fork"), 1, lambda done: None)
    assert "max_restarts=-1" in str(result.failure)
