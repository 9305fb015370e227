"""Traces of whole loaders: what each kind of epoch leaves in the file, and that it adds up."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from fastq_loader import DataLoader, Processes, ToDevice
from fastq_loader.errors import WorkerReplaced
from tests.conftest import running_script, wait_until
from tests.end_to_end.test_restarts import Doomed
from tests.support.crimes import CrimeAt, Rows, raise_value_error
from tests.support.datasets import Stream
from tests.support.late_device import late_device
from tests.support.thorough import thorough
from tests.support.traces import Event, asynchronous, batches, check, of, opened, read, tracks

pytestmark = pytest.mark.processes

KINDS: dict[str, dict[str, Any]] = {
    "map-style": {"dataset": Rows(24)},
    "iterable": {"dataset": Stream("tensors", (13, 7))},
    "dynamic": {"dataset": Rows(24), "schedule": "dynamic"},
    "in the order of arrival": {"dataset": Rows(24), "in_order": False},
    "persistent": {"dataset": Rows(24), "persistent_workers": True},
}


def checked(path: Path) -> list[Event]:
    """The events of a trace that was closed, and adds up."""
    events = read(path)
    check(events)
    return events


def traced(loader: DataLoader[Any], path: Path, epochs: int = 1) -> tuple[list[Event], int]:
    """The events of so many epochs, and how many batches they gave."""
    with loader.trace(path):
        given = sum(len(list(loader)) for _ in range(epochs))
        assert given
    loader.close()
    return checked(path), given


@thorough(but={"kind": "map-style"})
@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_of_every_epoch_is_there_from_its_task_to_its_step(kind: str, tmp_path: Path) -> None:
    loader: Any = DataLoader(batch_size=2, num_workers=2, **KINDS[kind])
    events, given = traced(loader, tmp_path / "a.json", epochs=2)
    assert len(batches(events)) == given
    names = list(tracks(events))
    pools = 1 if kind == "persistent" else 2
    workers = sum(name.startswith("worker ") for name in names)
    assert pools <= workers <= 2 * pools, "with `dynamic` one may be quicker than the other"
    consumer = {span["name"] for span in tracks(events)["consumer"]}
    assert {"iter", "next", "step", "sampler"} <= consumer
    assert ("end of the workers" in consumer) == (kind != "persistent")
    marks = [mark["name"] for mark in of(events, "i")]
    assert marks == ["epoch 0 begins", "epoch 0 ends", "epoch 1 begins", "epoch 1 ends"]


@thorough(but={"workers": 2})
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_a_mark_at_its_batch(workers: int, tmp_path: Path) -> None:
    loader = DataLoader(CrimeAt(raise_value_error, at=5), 2, num_workers=workers)
    with loader.trace(tmp_path / "a.json"):
        iterator = iter(loader)
        for at in range(6):
            if at == 2:
                with pytest.raises(ValueError, match="sample 5"):
                    next(iterator)
            else:
                next(iterator)
    loader.close()
    events = checked(tmp_path / "a.json")
    (mark,) = (mark for mark in of(events, "i") if "epoch" not in mark["name"])
    assert mark["name"] == "ValueError at batch 2"
    assert "sample 5 is broken" in mark["args"]["about"]


def test_a_worker_that_was_killed_and_replaced_is_a_mark(tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    dataset = Doomed(tmp_path / "deaths", 20)
    loader = DataLoader(dataset, 2, num_workers=2, workers=Processes(max_restarts=2))
    with pytest.warns(WorkerReplaced):
        events, given = traced(loader, tmp_path / "a.json")
    assert given == 12
    (mark,) = (mark for mark in of(events, "i") if "epoch" not in mark["name"])
    assert mark["name"].endswith("was replaced")
    assert "SIGKILL" in mark["args"]["about"]
    assert sum(name.startswith("worker ") for name in tracks(events)) == 3
    assert len(batches(events)) == 12


@thorough(but={"workers": 2})
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_to_a_device_have_a_track(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_device(monkeypatch):
        loader = DataLoader(Rows(16), 2, num_workers=workers, device=ToDevice("cuda", prefetch=2))
        list(loader)
        with loader.trace(tmp_path / "a.json"):
            list(loader)
            loader.close()
        events = checked(tmp_path / "a.json")
        copies = asynchronous(events, "copy to the device")
        if workers:
            assert len(copies) == 8
        assert copies
        assert all(begin["args"]["bytes"] > 0 for begin, _ in copies.values())
        assert "device" in {span["name"] for span in tracks(events)["consumer"]}
        list(loader)  # nobody is told
        loader.close()


def test_a_trace_that_is_cut_off_anywhere_can_be_opened(tmp_path: Path) -> None:
    traced(DataLoader(Rows(60), 2, num_workers=2), tmp_path / "a.json")
    long_trace = (tmp_path / "a.json").read_text()
    whole, draw = opened(long_trace), random.Random(0)
    for at in (0, 1, 2, 3, len(long_trace) - 1, *(draw.randrange(len(long_trace)) for _ in range(60))):
        events = opened(long_trace[:at])
        assert events == whole[: len(events)]
        assert sum(len(str(event)) for event in whole[len(events) + 1 :]) <= 2 * (len(long_trace) - at)


def test_a_consumer_that_is_killed_leaves_a_trace_that_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    script = f"""
        import time
        from fastq_loader import DataLoader
        from tests.support.crimes import Rows
        loader = DataLoader(Rows(10_000), 2, num_workers=2)
        with loader.trace({str(path)!r}):
            for seen, _ in enumerate(loader):
                time.sleep(0.002)
                if seen == 50:
                    print("fifty", flush=True)
    """
    with running_script(script, warm=True) as running:
        running.wait_for("fifty")
        os.kill(running.pid, signal.SIGKILL)
        assert running.finish().left == ()
    events = opened(path.read_text())
    check(events)
    assert len(batches(events)) > 30

    def is_free() -> bool:
        try:
            with DataLoader(Rows(4), 2).trace(path):
                return True
        except ValueError:  # a process whose first thread has ended may still be closing its files
            return False

    assert wait_until(is_free, 30), "the workers keep it locked"
