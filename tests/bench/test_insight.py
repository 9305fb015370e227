"""The axis of what the loader says of itself: what is compared with what, and a short run of every kind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psutil", reason="the bench extra is not installed")

from hypothesis import given
from hypothesis import strategies as st

from bench import run
from bench.arguments import parse
from bench.output.rows import CaseRows, Results
from bench.peers import LoaderSettings, make_peer
from bench.peers.uncounted import nothing_counted
from bench.timing import insight, tuning
from bench.timing.insight import COST, LABELS, VERDICTS
from bench.timing.rounds import Case, measure
from bench.timing.tuning import AUTO, INLINE, KEPT, TUNED, Order, Race, Setting, Tuned, named, settings
from bench.workloads import Load, find_workload, limited
from fastq_loader import DataLoader
from fastq_loader.consumer.receiver import Receiver
from fastq_loader.ipc.messages import Answer

SETTINGS = [Setting(2), Setting(1), Setting(1, 8, "round_robin"), Setting(0)]


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[Any, Case]]:
    """Those of the axis, small, by name, workers and start method."""
    monkeypatch.setattr(limited, "CASES", {name: limited.CASES[name] for name in ("consumer", "packing")})
    data = Tuned("numbers", lambda folder: Load(limited.Naps(), 2), step=0.001)
    monkeypatch.setattr(tuning, "loads", lambda: {"numbers": data})
    monkeypatch.setattr(tuning, "settings", lambda cpus, waits: SETTINGS)
    monkeypatch.setattr(insight, "COST_ROUNDS", 1)

    def found(more: str = "") -> dict[Any, Case]:
        line = f"--axis insight --workers 0,2 --blocks 1 --seconds 0.02 {more}"
        return {case[1:4]: case for case in run.cases(parse(line.split()), tmp_path)}

    return found


def measured(case: Case) -> CaseRows:
    found = Results(measure(case)).cases()[0]
    assert [peer.failure for peer in found.peers.values()] == [None] * len(found.peers)
    return found


def rates(*pairs: tuple[Setting, float]) -> Race:
    return Race(Load(limited.Naps(), 2), 0.0, "fork", 0.1, tried=dict(pairs))


# ---- what is compared with what -------------------------------------------------------------------


@given(st.floats(0.5, 300), st.booleans())
def test_settings_are_all_that_there_are(cpus: float, waits: bool) -> None:
    found = settings(cpus, waits)
    assert len({*found}) == len(found)
    numbers = list(dict.fromkeys(each.num_workers for each in found))
    assert numbers == sorted(numbers, reverse=True), "those with most workers first"
    assert {0, 1, min(2, numbers[0])} <= {*numbers}
    for workers in filter(None, numbers):
        others = {each[1:] for each in found if each.num_workers == workers}
        assert others == {(ahead, how) for ahead in tuning.PREFETCH for how in tuning.SCHEDULES}
    assert numbers[0] <= tuning.MOST
    assert all(larger <= 2 * smaller for larger, smaller in pairwise(numbers[:-1]))


@given(st.dictionaries(st.sampled_from(settings(2, True)), st.floats(1, 100), min_size=1))
def test_the_best_of_all_and_of_the_fixed_ones_go_on(tried: dict[Setting, float]) -> None:
    race = rates(*tried.items())
    kept = {each for each in tried if race.goes_on(each)}
    assert len(kept) <= sum(KEPT.values())
    for of in (list(tried), [each for each in tried if each.fixed]):
        assert not of or max(of, key=lambda each: tried[each]) in kept
    assert not race.goes_on(Setting(3)), "it was not tried"


def test_only_other_numbers_of_workers_are_what_auto_could_come_to() -> None:
    fixed = [Setting(0), Setting(0, 8, "round_robin"), Setting(4)]
    assert all(each.fixed for each in fixed)
    assert not Setting(4, 8).fixed
    assert not Setting(4, 2, "round_robin").fixed


def test_settings_in_words() -> None:
    assert named(*{"num_workers": 0}.values()) == INLINE == str(Setting(0))
    assert [str(Setting(1)), named(2, 8, "dynamic")] == [
        "1 worker, prefetch 2, dynamic",
        "2 workers, prefetch 8, dynamic",
    ]


def test_an_epoch_has_as_many_samples_as_it_should() -> None:
    order = Order(3)
    order.samples = 7
    assert [*order] == [0, 1, 2, 0, 1, 2, 0]
    assert len(order) == 7


# ---- short runs -----------------------------------------------------------------------------------


def test_runs_are_of_ours_only(cases: Callable[..., dict[Any, Case]]) -> None:
    assert cases("--peers torch") == {}
    verdicts = [(VERDICTS, 2, "fork"), (VERDICTS, 2, "spawn")]
    assert list(cases()) == [*verdicts, ("tune_numbers", 2, "fork"), (COST, 2, "fork")]


@pytest.mark.processes
def test_verdicts_stand_beside_the_stopwatch(cases: Callable[..., dict[Any, Case]]) -> None:
    found = measured(cases()[VERDICTS, 2, "fork"])
    assert {name: peer.about["limit"] for name, peer in found.peers.items()} == {
        "consumer": "consumer",
        "packing": "transport",
    }
    for peer in found.peers.values():
        assert len(peer.rows) == 1
        assert peer.rows[0]["right"] == (peer.rows[0]["limit"] == peer.about["limit"])
        assert 0 < peer.rows[0]["expected"] < 100


@pytest.mark.processes
def test_what_is_chosen_takes_turns_with_the_best(
    cases: Callable[..., dict[Any, Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def tune(loader: DataLoader[Any], *arguments: Any, **more: Any) -> Any:
        given[:] = loader.num_workers, *arguments
        rows = [SimpleNamespace(batches_per_second=500.0)]
        new = DataLoader(loader.dataset, 2, sampler=loader.sampler)
        return SimpleNamespace(settings={"num_workers": 0}, rows=rows, loader=new)

    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(tuning, "KEPT", {"": 1, "fixed": 1})
    monkeypatch.setattr(tuning, "EPOCH", 2.0)
    found = measured(cases()["tune_numbers", 2, "fork"])
    assert given == [2, 0.001, 1.0]
    assert list(found.peers) == [TUNED, *map(str, SETTINGS), AUTO]
    assert found.facts["tried"] == len(SETTINGS)
    tried = {name: found.peers[name].about["tried"] for name in map(str, SETTINGS)}
    best = max(tried, key=lambda name: tried[name])
    of_fixed = max((str(each) for each in SETTINGS if each.fixed), key=lambda name: tried[name])
    assert {name for name, peer in found.peers.items() if peer.rows} == {TUNED, AUTO, best, of_fixed}
    assert {row["batches"] for peer in found.peers.values() for row in peer.rows} == {20}, "500/s for 40 ms"
    assert found.peers[TUNED].label == f"tune: {INLINE}"
    assert found.peers[TUNED].about["num_workers"] == 0
    label = found.peers[AUTO].label
    assert label.startswith("auto: ")
    assert label.count(",") == 2, "two epochs before the first block"


@pytest.mark.processes
def test_what_counting_costs_is_measured_with_new_loaders(cases: Callable[..., dict[Any, Case]]) -> None:
    case = cases()[COST, 2, "fork"]
    found = measured(case)
    assert list(found.peers) == list(LABELS)
    assert all(len(peer.rows) == 1 for peer in found.peers.values())


@pytest.mark.processes
def test_nothing_is_counted_where_nothing_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = find_workload("tokens").load(tmp_path)
    answers: list[Answer] = []
    learn = Receiver._learn

    def noted(receiver: Receiver, worker: int, answer: Answer) -> Answer:
        answers.append(answer)
        return learn(receiver, worker, answer)

    monkeypatch.setattr(Receiver, "_learn", noted)

    def counted() -> list[float]:
        answers.clear()
        peer: Any = make_peer("fastq_loader", load, LoaderSettings(2, "fork"))
        batches = peer.epoch()
        held = [next(batches) for _ in range(8)]
        assert len(held) == 8
        found, costs = peer.loader.statistics(), peer.loader._resources.counters.history[-1].costs
        work = sum(worker.work_seconds for worker in found.workers)
        peer.close()
        times = [*(cost.load for cost in costs), *(each.collated for each in answers if each.collated)]
        return [found.wait_seconds, found.total.seconds, work, *times]

    with nothing_counted():
        assert counted() == [0.0, 0.0, 0.0]
        assert answers
    assert all(counted()), "all is as it was"
