"""What is drawn from rows: figures, ratios, goals, words. Small tables, no process."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

pytest.importorskip("pandas", reason="the bench extra is not installed")

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from bench.output import figures
from bench.output.figures import Spread, compared, figure, paired, ratio, spread
from bench.output.goals import Goal, goals, times_of
from bench.output.rows import CaseRows, Results
from bench.output.words import number, size
from bench.output.words import ratio as ratio_text
from bench.peers.device import OURS, REGISTER, RESIDENT, TORCH
from bench.timing.device import COPY, DRAIN, LENGTHS, READY, step_unit
from bench.timing.steady import latency
from tests.support import bench_example as example


def case_of(rows: list[dict[str, Any]]) -> CaseRows:
    return Results(rows).cases()[0]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_machine_that_drifts_is_no_noise(rates: list[float], faster: float) -> None:
    base = pd.Series(rates)
    found = ratio(base * faster, base)
    assert found == pytest.approx((faster, faster, faster))
    low, high = base.min(), base.max()
    assert spread(base) == Spread(pytest.approx(base.median()), low, high)


def test_a_ratio_is_of_medians_and_its_range_is_within_rounds() -> None:
    assert ratio(pd.Series([40, 20, 44]), pd.Series([20, 10, 20])) == pytest.approx((2.0, 2.0, 2.2))
    assert ratio(pd.Series([40, 20]), None) is None
    assert ratio(pd.Series([40], index=[1]), pd.Series([20], index=[0])) is None, "no round in common"
    assert ratio_text(Spread(1.2, 1.1, 1.4)) == "1.2 (1.1..1.4)"
    assert ratio_text(Spread(1.2, 0.9, 1.4)) == "1.2 (0.90..1.4), within noise"


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=200))
def test_the_median_of_many_ratios_lies_between_two_of_them(ratios: list[float]) -> None:
    blocks = {"a": [{"batches": each, "seconds": 1.0} for each in ratios]}
    blocks["b"] = [{"batches": 1.0, "seconds": 1.0} for _ in ratios]
    case = case_of(example.case("insight", "cost", {}, {"a": {}, "b": {}}, blocks))
    found = paired(case, "a", "b")
    assert found is not None
    assert found.median == pytest.approx(median(ratios))
    assert min(ratios) <= found.low <= found.median <= found.high <= max(ratios)
    outside = sum(each < found.low for each in ratios), sum(each > found.high for each in ratios)
    assert max(outside) <= len(ratios) / 2 - 0.98 * len(ratios) ** 0.5 + 1
    assert paired(case, "a", "nosuch") is None


def test_sixty_rounds_are_cut_where_the_tables_say() -> None:
    blocks = {"a": [{"batches": each, "seconds": 1.0} for each in range(1, 61)]}
    blocks["b"] = [{"batches": 1.0, "seconds": 1.0} for _ in range(60)]
    case = case_of(example.case("insight", "cost", {}, {"a": {}, "b": {}}, blocks))
    assert paired(case, "a", "b") == Spread(30.5, 22, 39), "the 22nd of 60 and the 22nd from above"


def test_costs_are_for_a_batch() -> None:
    case = case_of(example.steady())
    assert figure(case, "torch", "rate") == (100, 90, 110)
    for measure, cost in (("cpu", 0.004), ("consumer_cpu", 0.001), ("worker_cpu", 0.003), ("switches", 10)):
        assert figure(case, "torch", measure) == pytest.approx((cost, cost / 1.1, cost / 0.9))
    assert compared(case, "fastq_loader", "torch") == pytest.approx((10, 10, 10))
    assert figures.best_other(case) == "grain"
    assert figures.best_other(case_of(example.steady(grain={"failure": "no"}))) is None
    assert figure(case, "torch", "nosuch") is figure(case, "nosuch", "rate") is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_percentiles_are_waits_that_occurred(waits: list[float]) -> None:
    found = latency(waits)
    assert found["calls"] == len(waits)
    assert found["longest"] == max(waits)
    for percent in (50, 95, 99):
        reached = sum(wait <= found[f"p{percent}"] for wait in waits)
        assert reached >= percent * len(waits) / 100
        assert found[f"p{percent}"] in waits


def test_numbers_and_sizes() -> None:
    values = (0, 0.0512, 0.704, 0.996, 9.94, 9.96, 12_345.6, -12_345.6, None)
    assert list(map(number, values)) == ["0", "0.051", "0.70", "1.0", "9.9", "10", "12,346", "-12,346", "–"]  # noqa: RUF001
    assert [size(999), size(2560), size(38.5e6)] == ["999 B", "2.56 kB", "38.5 MB"]
    assert [size(1 << 10, 1024), size(1 << 28, 1024)] == ["1 KiB", "256 MiB"]


def test_times_are_of_the_bound_or_of_the_same_round() -> None:
    case = case_of(example.schedule())
    assert times_of(case, "dynamic", "bound") == (1.1, 1.0, 1.15)
    assert times_of(case, "torch", "dynamic") == pytest.approx((2.0, 2.0 / 1.15, 2.2))
    assert times_of(case, "round_robin", "bound") is times_of(case, "dynamic", "nobody") is None
    assert times_of(case_of(example.schedule(bound=None)), "dynamic", "bound") is None


@pytest.mark.parametrize(
    ("figure", "at_most", "said"),
    [
        (Spread(1.1, 1.0, 1.2), True, "met"),
        (Spread(1.1, 1.0, 1.3), True, "met, within noise"),
        (Spread(1.25, 1.1, 1.3), True, "missed, within noise"),
        (Spread(1.25, 1.21, 1.3), True, "missed"),
        (Spread(1.25, 1.2, 1.3), False, "met"),
        (Spread(1.1, 1.0, 1.19), False, "missed"),
        (None, True, "not measured"),
    ],
)
def test_verdicts(figure: Spread | None, at_most: bool, said: str) -> None:
    assert Goal("", 1.2, figure, at_most=at_most).verdict == said


@pytest.mark.parametrize(("supply", "enough"), [(5000.0, LENGTHS[2:]), (100.0, LENGTHS[1:])])
def test_enough_is_supplied_when_workers_and_link_have_a_fifth_to_spare(
    supply: float, enough: tuple[str, ...]
) -> None:
    unit = step_unit(0.001, supply)
    assert unit == pytest.approx(0.001 if supply > 1000 else 0.012), "of a copy, unless workers are slower"
    shape = CaseRows({"copy_seconds": 0.001, "supply": supply, "unit": unit})
    assert tuple(length for length in LENGTHS if figures.supplied(shape, length)) == enough


def test_figures_of_a_device() -> None:
    shape = case_of(example.shape("large"))
    assert figures.share_of_peak(shape, REGISTER, DRAIN) == pytest.approx([0.97] * 3)
    assert figures.share_of_peak(shape, REGISTER, COPY) == pytest.approx([0.9894] * 3)
    assert figures.share_of_peak(shape, RESIDENT, DRAIN) is None
    own, bound = 100 * 0.3 / 1.3, 100 * 0.0005 / 1.0005
    assert figures.stall_points(shape, TORCH, "2") == pytest.approx([own - bound] * 3)
    assert figures.stall_points(shape, TORCH, "3") is None
    assert figure(shape, TORCH, "p99", READY, 1e6) == pytest.approx((80, 80, 80))


def verdicts(found: list[Goal]) -> dict[str, str]:
    return {goal.measure: goal.verdict for goal in found}


def test_every_goal_of_what_the_loader_says_of_itself_is_there() -> None:
    found = {goal.measure: goal for goal in goals(Results(example.insight()))}
    assert [(goal.wanted, goal.verdict) for goal in found.values()] == [
        (100, "met"),
        (5, "met"),
        (0.9, "met"),
        (0.85, "missed"),
        (0, "met"),
        (0.99, "met"),
        (0.95, "missed"),
    ]
    wrong = next(iter(goals(Results(example.insight(wrong="sampler")))))
    assert wrong.verdict == "missed", "one wrong verdict is one too many"


@pytest.mark.parametrize(("chosen", "said"), [(0, "met"), (2, "missed"), (None, "not there")])
def test_no_workers_are_to_be_chosen_unless_workers_win(chosen: int | None, said: str) -> None:
    rows = example.insight()
    for row in rows:
        if row["row"] == "peer" and row["peer"] == "tune":
            row["num_workers"] = chosen
    found = [goal.verdict for goal in goals(Results(rows)) if "where none are as fast" in goal.measure]
    assert found == ([said] if chosen is not None else [])
    for row in rows:
        if row["row"] == "block" and row["peer"] == "0 workers":
            row["batches"] *= 0.8
    assert not [goal for goal in goals(Results(rows)) if "where none are as fast" in goal.measure]


def test_every_goal_of_a_device_is_there() -> None:
    found = verdicts(goals(example.device_run()))
    assert len([name for name in found if "reserved" in name]) == 3 * len(OURS)
    stalls = [name.split(":")[0] for name in found if "stall" in name]
    assert stalls == ["large"] * 2 + ["fields_32"] * 3 + ["fields_500"] * 3
    assert len([name for name in found if "GB/s" in name or "CPU" in name]) == 3
    assert [name.split(":")[0] for name in found if "next()" in name] == ["fields_32", "fields_500"]
    assert set(found.values()) == {"met"}


def test_goals_of_other_machines() -> None:
    assert [(goal.wanted, goal.verdict) for goal in goals(Results(example.cluster()))] == [
        (4, "met"),
        (0.6, "met"),
        (0.9, "missed"),
        (2, "met"),
        (0.95, "met, within noise"),
        (0.85, "missed"),
        (3, "met"),
    ]


def test_goals_that_are_not_met_say_so() -> None:
    rows = example.shape("large")
    for row in rows:
        if row["row"] == "block" and row["peer"] == REGISTER:
            row |= {"seconds": 1.1 * row["seconds"]} if row["part"] == DRAIN else {}
            row |= {"gaps": 0.05} if row["part"] == "2" else {}
        if row["row"] == "peer" and row["peer"] == REGISTER:
            row["reserved_20"] += 1
    found = verdicts(goals(Results(rows)))
    assert sorted(name.split(": ")[-1][:12] for name, said in found.items() if said == "missed") == [
        *("GB/s of a fu", "memory reser", "stall beyond")
    ]


@pytest.mark.parametrize("broken", [REGISTER, TORCH])
def test_goals_of_an_arm_that_broke_are_not_measured(broken: str) -> None:
    found = verdicts(goals(example.device_run(**{broken: {"failure": "it broke"}})))
    compared_to_torch = [said for name, said in found.items() if "torch / ours" in name]
    assert compared_to_torch == ["not measured"] * 3
    drain = next(said for name, said in found.items() if "full drain / peak" in name)
    assert drain == ("met" if broken == TORCH else "not measured")
