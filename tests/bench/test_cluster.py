"""The axis of other machines: what lanes share, what is missing, and a short run of every kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil", reason="the bench extra is not installed")

from bench import run
from bench.arguments import parse
from bench.output.rows import CaseRows, Results
from bench.peers import LoaderSettings, Unsupported
from bench.peers import cluster as peers
from bench.peers.cluster import FastqElsewhere
from bench.timing import cluster, links
from bench.timing.bare_tcp import HERE, BareLane, Spot
from bench.timing.cluster import (
    BARE,
    LABELS,
    LINKED,
    LOCAL,
    LOOPBACK,
    LOOPBACKS,
    REMOTE,
    TURN,
    WORK,
    TurnLane,
)
from bench.timing.rounds import Case, measure
from bench.timing.shared import Shared
from bench.workloads.slow import naps
from fastq_loader import RayWorkers

SETTINGS = LoaderSettings(2, "fork")


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Case]]:
    """Those of the axis, small, by name."""
    monkeypatch.setattr(cluster, "WORKERS", 2)
    monkeypatch.setattr(cluster, "LINKED_SECONDS", 1)

    def found(more: str = "") -> dict[str, Case]:
        line = f"--axis cluster --blocks 1 --seconds 0.02 {more}"
        return {case.name: case for case in run.cases(parse(line.split()), tmp_path)}

    return found


def measured(case: Case) -> CaseRows:
    return Results(measure(case)).cases()[0]


def failures(found: CaseRows) -> dict[str, str | None]:
    return {name: peer.failure for name, peer in found.peers.items()}


# ---- what there is, and what is missing -------------------------------------------------------------


def test_cases_are_of_ours_only(cases: Callable[..., dict[str, Case]]) -> None:
    assert cases("--peers torch") == {}
    assert list(cases()) == [*LOOPBACKS, *LINKED, *WORK, TURN]


def test_without_ray_the_reason_stands_in_place_of_figures(
    cases: Callable[..., dict[str, Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayWorkers, "missing", lambda workers: "ray, which is not installed")
    for name, case in cases().items():
        assert failures(measured(case)) == {REMOTE: "needs ray, which is not installed"}, name


@pytest.mark.parametrize(("user", "tools", "why"), [(1000, "", "needs root"), (0, "ip", "needs tc, unshare")])
def test_without_limited_links_the_reason_stands_in_place_of_figures(
    user: int,
    tools: str,
    why: str,
    cases: Callable[..., dict[str, Case]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links.os, "geteuid", lambda: user)
    monkeypatch.setattr(RayWorkers, "missing", lambda workers: "")
    monkeypatch.setattr(links.shutil, "which", lambda tool: tool if tool in tools else None)
    for name in LINKED:
        assert str(failures(measured(cases()[name]))[REMOTE]).startswith(why)


def test_what_lanes_share_is_made_by_the_first_and_ended_by_the_last() -> None:
    said: list[str] = []

    @contextmanager
    def make() -> Iterator[str]:
        said.append("begin")
        yield "value"
        said.append("end")

    shared = Shared(make)
    for _ in range(2):
        first, second = shared.used(), shared.used()
        assert (first.__enter__(), second.__enter__(), shared.value) == ("value", "value", "value")
        first.__exit__(None, None, None)
        assert said.pop() == "begin"
        second.__exit__(None, None, None)
        assert said.pop() == "end"


def test_what_could_not_be_made_is_not_tried_again() -> None:
    tried: list[None] = []

    @contextmanager
    def make() -> Iterator[None]:
        tried.append(None)
        raise OSError("no cable")
        yield

    shared = Shared(make)
    for error in (OSError, Unsupported, Unsupported):
        with pytest.raises(error, match="no cable"), shared.used():
            pass
    assert len(tried) == 1


# ---- short runs -------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_bare_stream_counts_whole_batches() -> None:
    lane = BareLane(BARE, BARE, 0.02, batch_bytes=1000, spots=lambda: [HERE, HERE])
    try:
        lane.start()
        rows = lane.block("")
        assert bytes(lane._memory[0]) == (bytes(range(256)) * 4)[:1000]
    finally:
        lane.close()
    assert rows[0]["batches"] >= 2
    assert rows[0]["seconds"] > 0
    assert threading.active_count() == 1


@pytest.mark.processes
def test_all_workers_are_at_work_when_a_loader_is_made(tmp_path: Path) -> None:
    peer = FastqElsewhere(naps(1.0).load(tmp_path), SETTINGS, "processes")
    try:
        assert [worker.batches > 0 for worker in peer.loader.statistics().workers] == [True, True]
    finally:
        peer.close()


@pytest.mark.processes
def test_a_turn_is_from_the_last_batch_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "EPOCH", 3)
    load = naps(0.0, 3).load(tmp_path)
    lane = TurnLane(LOCAL, LOCAL, make=partial(FastqElsewhere, load, SETTINGS, "processes"))
    try:
        lane.start()
        assert 0 < lane.block("")[0]["seconds"] < 10
        monkeypatch.setattr(cluster, "EPOCH", 2)
        with pytest.raises(RuntimeError, match="an epoch of 2 batches went on"):
            lane.block("")
    finally:
        lane.close()


@pytest.mark.processes
@pytest.mark.skipif(links.missing() != "", reason=f"needs {links.missing()}")
def test_a_limited_link_is_a_network_of_its_own() -> None:
    try:
        with links.limited_links(2) as both:
            lane = BareLane(
                BARE,
                BARE,
                0.02,
                batch_bytes=1000,
                spots=lambda: [Spot(each.there, each.inside) for each in both],
            )
            try:
                lane.start()
                assert lane.block("")[0]["batches"] >= 2
            finally:
                lane.close()
            cables = {each.name for each in Path("/sys/class/net").glob("fastq*")}
            assert len(cables) >= 2
    except Unsupported as error:
        pytest.skip(str(error))
    assert not cables & {each.name for each in Path("/sys/class/net").glob("fastq*")}


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # Ray's own
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", [LOOPBACK, TURN, "links_small"])
def test_every_contender_is_measured(
    name: str, cases: Callable[..., dict[str, Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    if name in LINKED and links.missing():
        pytest.skip(f"needs {links.missing()}")
    monkeypatch.setattr(peers, "EPOCH", 64)
    found = measured(cases()[name])
    reasons: dict[str, Any] = failures(found)
    assert {*reasons} <= {*LABELS}
    if str(reasons.get(cluster.DATA)).startswith("not installed"):  # it needs pandas and pyarrow
        del reasons[cluster.DATA]
    assert reasons == dict.fromkeys(reasons)
    assert all(len(found.peers[peer].rows) == 1 for peer in reasons)
