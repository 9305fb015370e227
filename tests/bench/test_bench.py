"""The bench: figures, files, the command line, comparisons; and one run of a fraction of a second."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from tests.conftest import run_script

pytest.importorskip("rich", reason="the bench extra is not installed")
pytest.importorskip("PIL", reason="the bench extra is not installed")

from rich.console import Console

from bench import files, report, results
from bench.__main__ import _results
from bench.arguments import AXES, SHORT, parse
from bench.batches import compare, nbytes
from bench.ceiling import SMALLEST_BUFFER, WarmBuffers
from bench.fetch import first_batch, share
from bench.jobs import Files, _fitting, jobs
from bench.machine import days
from bench.measure import reason
from bench.peers import PEERS, LoaderSettings, Unsupported
from bench.results import (
    Block,
    Latency,
    MomentResult,
    Peak,
    PeerResult,
    Repeated,
    Results,
    Spread,
    WorkloadResult,
)
from bench.start import measure_start
from bench.workloads import Load, all_workloads, find_workload


def blocks(*rates: float) -> list[Block]:
    return [Block(round(10 * rate), 10.0, 1.0, 3.0, 20) for rate in rates]


def a_result() -> WorkloadResult:
    peak = Peak(100, 60, 20, 20, 30, 5, 7)
    measured = PeerResult("torch", blocks(10, 20), Latency(300, 0.1, 0.2, 0.3, 0.4), peak, ["a note"])
    return WorkloadResult(
        name="rows",
        description="rows",
        batch_size=4,
        batch_bytes=128.0,
        transport_bound=True,
        num_workers=2,
        start_method="fork",
        ceiling=blocks(100, 200),
        peers={
            "torch": measured,
            "fastq_loader": replace(measured, label="fastq_loader", blocks=blocks(30, 40), peak=None),
            "grain": PeerResult("Grain", failure="not installed: No module named 'grain'"),
        },
    )


def a_moment() -> MomentResult:
    peers = {"torch": Repeated("torch", [0.1, 0.3]), "fastq_loader": Repeated("fastq_loader", failure="no")}
    return MomentResult("first batch", "rows", 2, "spawn", peers)


# ---- figures ------------------------------------------------------------------------------------


def test_rates_are_medians_with_their_range() -> None:
    assert results.rate(blocks(10, 40, 20)) == Spread(20, 10, 40)


def test_a_ratio_is_of_medians_and_its_range_is_within_rounds() -> None:
    # The machine was half as fast in the second round: neither peer is the faster one for that.
    ratio = results.rate_ratio(blocks(40, 20, 44), blocks(20, 10, 20))
    assert ratio == Spread(pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.2))
    assert not results.within_noise(ratio)


def test_rounds_that_disagree_are_noise() -> None:
    assert results.within_noise(results.rate_ratio(blocks(40, 20), blocks(20, 30)))


def test_times_shorter() -> None:
    assert results.time_ratio([0.2, 0.4, 0.3], [0.1, 0.1, 0.1]) == Spread(
        pytest.approx(3.0), pytest.approx(2.0), pytest.approx(4.0)
    )


def test_costs_are_for_a_batch() -> None:
    measured = blocks(10, 10)  # 100 batches each
    assert results.consumer_cpu(measured).median == pytest.approx(0.01)
    assert results.worker_cpu(measured).median == pytest.approx(0.03)
    assert results.cpu(measured).median == pytest.approx(0.04)
    assert results.switches(measured).median == pytest.approx(0.2)


def test_percentiles_are_waits_that_occurred() -> None:
    waits = [milliseconds / 1000 for milliseconds in range(100, 0, -1)]
    assert results.latency(waits) == Latency(100, 0.050, 0.095, 0.099, 0.100)
    assert results.latency([0.5]) == Latency(1, 0.5, 0.5, 0.5, 0.5)


# ---- files --------------------------------------------------------------------------------------


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    written = Results(
        arguments={"blocks": 2},
        machine={"cpu": "a"},
        workloads=[a_result()],
        by_bytes=[a_result(), a_result()],
        start=[a_moment()],
    )
    files.write(tmp_path / "results.json", written)
    assert files.read(tmp_path / "results.json") == written


@pytest.mark.parametrize("content", ["{}", "[]", '{"version": 1}', '{"version": 2, "workloads": 3}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"results\.json"):
        files.read(path)


# ---- the command line ---------------------------------------------------------------------------


def test_a_bare_command_is_a_short_run() -> None:
    options = parse([])
    assert options.axes == ("steady",)
    assert options.workloads["steady"] == SHORT
    assert options.workers["steady"] == (2,)
    assert options.peers == tuple(name for name in PEERS if name != "fastq_loader_cached")
    assert not options.memory
    assert options.json is None


def test_full_is_everything() -> None:
    options = parse(["--full"])
    assert options.axes == tuple(AXES)
    assert options.workloads["steady"] == tuple(all_workloads())
    assert options.memory
    assert options.blocks > parse([]).blocks


def test_what_is_named_is_what_runs() -> None:
    line = "rows tokens --axis steady,turns --workers 0,4 --peers fastq_loader,torch --blocks 3 --seconds 0.1"
    options = parse([*line.split(), "--memory"])
    assert options.axes == ("steady", "turns")
    assert options.workloads["steady"] == options.workloads["turns"] == ("rows", "tokens")
    assert options.workers["steady"] == (0, 4)
    assert options.workers["turns"] == (4,)
    assert options.peers == ("fastq_loader", "torch")
    assert (options.blocks, options.seconds, options.memory) == (3, 0.1, True)


def test_what_a_resumed_run_has_is_not_measured_again(tmp_path: Path) -> None:
    options = parse(["rows", "csv", "--axis", "steady,start,turns"])
    nothing = Results({}, {})
    everything = [job.title for job in jobs(options, Files(tmp_path), nothing)]
    begun = Results({}, {}, workloads=[a_result()], start=[a_moment()], turns=[a_moment()])
    left = [job.title for job in jobs(options, Files(tmp_path), begun)]
    # `a_result` is rows with 2 workers under fork; `a_moment` rows with 2 workers under spawn.
    assert sorted(set(everything) - set(left)) == ["rows, 2 workers", "rows, 2 workers, spawn"]


def test_a_resumed_run_says_from_when_to_when_it_was_measured() -> None:
    assert days({"date": "2026-11-20T14:21:36+00:00"}) == "2026-11-20"
    resumed = {"date": "2026-11-20T14:21:36+00:00", "resumed": "2026-11-20T23:00:00+00:00"}
    assert days(resumed) == "2026-11-20"
    assert days(resumed | {"resumed": "2026-11-21T00:58:25+00:00"}) == "2026-11-20 to 2026-11-21"


def test_going_on_with_a_file_is_noted_in_it(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first, later = {"date": "2026-11-20T14:21:36+00:00"}, {"date": "2026-11-21T00:58:25+00:00"}
    files.write(path, Results({}, dict(first), workloads=[a_result()]))
    fresh = _results(parse(["--json", str(path)]), dict(later))
    assert (fresh.machine, fresh.workloads) == (later, [])
    gone_on = _results(parse(["--json", str(path), "--resume"]), dict(later))
    assert gone_on.machine == first | {"resumed": later["date"]}
    assert gone_on.workloads == [a_result()]


def test_large_batches_are_measured_with_the_peers_that_fit() -> None:
    peers = ("torch", "fastq_loader", "grain")
    assert _fitting(peers, batch_bytes=1 << 20, memory=8 << 30) == (peers, None)
    some, said = _fitting(peers, batch_bytes=256 << 20, memory=16 << 30)
    assert some == ("torch", "fastq_loader")
    assert said is not None
    assert said.endswith(": Grain")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nosuch", "is not a workload"),
        ("--peers torch,nosuch", "is not a peer"),
        ("--axis nosuch", "is not an axis"),
        ("--workers two", "whole numbers"),
        ("--workers -1", "whole numbers"),
        ("--blocks 0", "at least 1"),
        ("--seconds 0", "above 0"),
        ("--seconds nan", "above 0"),
        ("--json /nosuch/x.json", "folder that exists"),
        ("--plot /nosuch", "folder that exists"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(line.split())
    assert named in capsys.readouterr().err


# ---- batches ------------------------------------------------------------------------------------


def a_batch() -> dict[str, Any]:
    return {"x": torch.arange(6).reshape(2, 3), "rest": [np.ones(2), "text", None]}


def test_equal_batches_have_no_difference() -> None:
    difference = compare(a_batch(), a_batch())
    assert (difference.wrong, difference.types) == ([], [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, r"\['x'\] has other values"),
        ({"x": torch.arange(6)}, r"\['x'\] has shape \(6,\), not \(2, 3\)"),
        ({"x": torch.arange(6.0).reshape(2, 3)}, r"dtype torch.float32, not torch.int64"),
        ({"x": None}, "no array"),
        ({"rest": [np.ones(2), "text"]}, "another length"),
        ({"rest": [np.ones(2), "other", None]}, "other values"),
        ({"more": 1}, "other keys"),
    ],
)
def test_other_batches_are_told(change: dict[str, Any], said: str) -> None:
    wrong = compare(a_batch() | change, a_batch()).wrong
    assert len(wrong) == 1

    assert re.search(said, wrong[0])


def test_another_type_with_the_same_numbers_is_no_other_batch() -> None:
    batch = a_batch()
    batch["x"] = batch["x"].numpy()
    batch["rest"] = tuple(batch["rest"])
    difference = compare(batch, a_batch())
    assert difference.wrong == []
    assert difference.types == ["batch['x'] is ndarray, not Tensor", "batch['rest'] is tuple, not list"]


def test_without_values_only_shapes_count() -> None:
    batch = a_batch()
    batch["x"] = batch["x"] + 1
    assert compare(batch, a_batch(), values=False).wrong == []


def test_bytes_of_a_batch() -> None:
    assert nbytes(a_batch()) == 6 * 8 + 2 * 8 + len("text")


# ---- a worker's share ---------------------------------------------------------------------------


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index * index


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        worker = get_worker_info()
        return iter(range(12) if worker is None else range(worker.id, 12, worker.num_workers))


def test_batches_are_dealt_out_as_torch_does() -> None:
    load = Load(Squares(), batch_size=4)
    second = [batch.tolist() for batch in share(load, 1, 3)]
    assert second == [[16, 25, 36, 49], [256, 289, 324, 361]]
    assert len(list(share(load, 0, 0))) == 6


def test_a_stream_is_divided_by_itself() -> None:
    load = Load(Numbers(), batch_size=3)
    assert first_batch(load, 0).tolist() == [0, 1, 2]
    assert first_batch(load, 2).tolist() == [0, 2, 4]
    assert get_worker_info() is None


def test_shuffled_loads_give_the_same_order_to_everybody() -> None:
    load = Load(Squares(), batch_size=4, shuffle=True, batches=3)
    order = list(load.index_batches())
    assert order == list(load.index_batches())
    assert len(order) == 3


# ---- the ceiling --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, SMALLEST_BUFFER])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_the_ceiling_makes_the_batches_that_torch_makes(
    length: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = torch.arange(length, dtype=torch.float32)
    samples = [{"x": sample if kind == "tensor" else sample.numpy(), "y": number} for number in range(4)]
    expected = default_collate(samples)
    buffers = WarmBuffers()
    from torch.utils.data._utils import collate

    monkeypatch.setattr(collate, "default_collate_fn_map", dict(collate.default_collate_fn_map))
    buffers.install()
    places = set()
    for _ in range(2):
        buffers.begin_batch()
        batch = default_collate(samples)
        assert compare(batch, expected).wrong == []
        places.add(batch["x"].data_ptr())
        kept = batch  # noqa: F841  # so that malloc cannot hand out the same memory again
    if length == SMALLEST_BUFFER:
        assert len(places) == 1


# ---- reports ------------------------------------------------------------------------------------


def rendered(table: Any) -> str:
    written = io.StringIO()
    Console(width=report.PIPED_WIDTH, file=written).print(table)
    return written.getvalue()


def test_a_peer_without_figures_is_named_with_the_reason() -> None:
    text = rendered(report.workload_table(a_result()))
    assert "Grain: not measured: not installed: No module named 'grain'" in text
    assert "torch: a note" in text
    assert "2.3 (2.0-3.0)" in text  # fastq_loader / torch
    assert "23%" in text  # and its share of the ceiling
    assert "within noise" not in text


def test_a_table_without_the_baseline_has_no_ratios() -> None:
    result = a_result()
    del result.peers["torch"]
    assert "23%" in rendered(report.workload_table(result))


def test_moments_are_shown_with_their_failures() -> None:
    text = rendered(report.moments_table([a_moment()]))
    assert "200 (100-300)" in text
    assert "fastq_loader" in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'grain'"), "not installed: No module named 'grain'"),
        (Unsupported("no streams"), "no streams"),
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError(), "ValueError: "),
    ],
)
def test_reasons_are_one_line(error: Exception, said: str) -> None:
    assert reason(error) == said


def test_sized_workloads_are_found_by_name() -> None:
    assert find_workload("bytes_4096").name == "bytes_4096"
    with pytest.raises(KeyError):
        find_workload("nosuch")


# ---- a run --------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_run_measures_every_peer_and_names_the_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    line = (
        "rows --peers torch,fastq_loader,grain --blocks 2 --seconds 0.05 --memory "
        f"--axis steady,turns --json {path}"
    )
    ended = run_script(
        f"""
        import sys
        from bench.__main__ import main

        sys.modules["grain"] = None  # as if it were not installed
        sys.argv[1:] = {line.split()!r}
        sys.exit(main())
        """,
        timeout=90,
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.left
    found = files.read(path)
    (rows,) = found.workloads
    assert len(rows.ceiling) == 2
    assert rows.peers["grain"].failure is not None
    assert "not installed" in rows.peers["grain"].failure
    for name in ("torch", "fastq_loader"):
        peer = rows.peers[name]
        assert peer.failure is None
        assert len(peer.blocks) == 2
        assert all(block.batches and block.consumer_cpu for block in peer.blocks)
        assert peer.latency is not None
        assert peer.peak is not None
        assert peer.peak.consumer_descriptors
        assert any(block.worker_cpu for block in peer.blocks)
    assert {moment.moment for moment in found.turns} >= {"first batch", "epoch turn, persistent workers"}
    assert all(len(peer.seconds) == 2 for moment in found.turns for peer in moment.peers.values())
    assert "Grain: not measured" in ended.stdout


@pytest.mark.processes
def test_a_start_is_timed_in_a_fresh_process(tmp_path: Path) -> None:
    names = ["fastq_loader", "stateful"]
    result = measure_start("nosuch", tmp_path, names[1:], LoaderSettings(1, "fork"), 1, lambda name: None)
    assert "nosuch" in str(result.peers["stateful"].failure)
    result = measure_start("rows", tmp_path, names[:1], LoaderSettings(1, "fork"), 1, lambda name: None)
    (seconds,) = result.peers["fastq_loader"].seconds
    assert 0 < seconds < 60


@pytest.mark.processes
def test_a_failing_peer_does_not_end_the_run(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    ended = run_script(
        f"""
        import sys
        import time
        import types
        from itertools import islice
        from bench import measure
        from bench.__main__ import main
        from bench.peers import PEERS, Entry
        from bench.peers.torch_loader import TorchInline

        class Raising(TorchInline):
            def epoch(self):
                yield from islice(super().epoch(), 100)
                raise ValueError("in the middle")

        class Hanging(TorchInline):
            def epoch(self):
                yield from islice(super().epoch(), 100)
                time.sleep(60)

        class Wrong(TorchInline):
            def epoch(self):
                return ([rows + 1, labels] for rows, labels in super().epoch())

        class Short(TorchInline):
            def epoch(self):
                return islice(super().epoch(), 0)

        bad = types.ModuleType("bench.peers.bad")
        for peer in (Raising, Hanging, Wrong, Short):
            setattr(bad, peer.__name__, peer)
            PEERS[peer.__name__] = Entry("bad", peer.__name__, peer.__name__)
        sys.modules[bad.__name__] = bad
        measure.HANGING_S = measure.STARTING_S = 1.0
        names = "Raising,Hanging,Wrong,Short,torch_0"
        line = "rows --blocks 2 --seconds 0.05 --peers"
        sys.argv[1:] = [*line.split(), names, "--json", {str(path)!r}]
        sys.exit(main())
        """,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.left
    (rows,) = files.read(path).workloads
    failures = {name: peer.failure for name, peer in rows.peers.items()}
    assert failures == {
        "Raising": "ValueError: in the middle",
        "Hanging": "TimeoutError: took more than 1 s",
        "Wrong": "RuntimeError: wrong batches: batch[0] has other values",
        "Short": "RuntimeError: it gave no batch",
        "torch_0": None,
    }
    assert len(rows.peers["torch_0"].blocks) == 2
