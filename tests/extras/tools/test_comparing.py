"""`compare`: what is equal, the first difference in words with its likely cause, and what stays as it was."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastq_loader import DataLoader, Skip, compare
from fastq_loader.extras.tools import comparing
from fastq_loader.extras.tools.command import main
from fastq_loader.extras.tools.leaves import difference, digest, leaves
from tests.conftest import running_script
from tests.support.datasets import Opaque, Point, Stream
from tests.support.gates import LIMIT
from tests.support.loaders import generator_states
from tests.support.thorough import thorough

TORCHS = torch.utils.data.DataLoader


class Drawn(Dataset[Any]):
    """Draws from all generators, its own too; counts what it reads."""

    def __init__(self, source: Any = None) -> None:
        self.read, self.own, self.source = 0, np.random.default_rng(7), source

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.source is not None:
            return self.source(index)
        return torch.rand(3), {"own": self.own.random(2), "all": (np.random.rand(), random.random(), index)}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.rand(2) + number for number in itertools.count())


class MutableFields:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: Any) -> Any:
        self.calls += 1
        return self.calls


class Odd(DataLoader[Any]):
    """Changes one value; of a text it cannot."""

    def _get_iterator(self) -> Any:
        for number, batch in enumerate(super()._get_iterator()):
            if number == 2:
                batch = -1 if isinstance(batch, int) else (batch[0][1, 2].add_(1), batch)[1]
            yield batch


class Drawing(DataLoader[Any]):
    """Draws after the epoch."""

    def _get_iterator(self) -> Any:
        yield from super()._get_iterator()
        random.random()


def missing(index: int) -> Any:
    if index == 13:
        raise FileNotFoundError("13.png")
    return index


@pytest.mark.processes
@thorough(after=1)
@pytest.mark.parametrize(("kind", "workers"), [(TORCHS, 0), (DataLoader, 2)])
def test_equal_loaders_are_equal_and_stay_as_they_are(kind: Any, workers: int) -> None:
    dataset, generator = Drawn(), torch.Generator().manual_seed(3)
    loader = kind(dataset, 4, shuffle=True, num_workers=workers, generator=generator)
    before = generator_states(dataset, generator)
    found = compare(loader, epochs=2, step_seconds=0.001)
    assert (found.equal, found.difference, found.batches) == (True, None, 12)
    assert generator_states(dataset, generator) == before
    assert dataset.read == 0
    assert [row.loader for row in found.rows] == ["torch", "fastq_loader"]
    for row in found.rows:
        assert row.batches == 12
        assert row.batches_per_second == pytest.approx(12 / row.seconds)
        assert 0 < row.first_batch_seconds < row.seconds > 0.012
        assert row.cpu_seconds > 0
        assert 1e6 < row.memory_bytes < 1e10
    head, speed, *_ = str(found).splitlines()
    assert head == "Equal: 12 batches (values, types, strides, order), and the random generators."
    assert re.match(r"fastq_loader gives \d+\.\d times torch's batches per second\.", speed)
    header, torchs, ours = str(found).split("\n\n")[1].splitlines()
    assert header.split() == ["batches/s", "first", "batch", "CPU", "memory"]
    assert (torchs.split()[0], ours.split()[0]) == ("torch", "fastq_loader")


@thorough(after=3)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (
            Odd(Drawn(), 4),
            r"batch 2 of epoch 0: batch\[0\]\[1, 2\] is 0\.\d+ with torch, and 1\.\d+ with fastq_loader\.\n"
            r"Likely cause: an override in the subclass Odd\.",
        ),
        (
            Drawing(Drawn(), 4),
            r"the end of epoch 0: generators\['random'\] is str '\w+' with torch, and str '\w+' with",
        ),
        (
            DataLoader(Drawn(lambda index: time.time_ns()), 4),
            r"batch 0 of epoch 0: batch\[0\] is \d+ with torch, and \d+ with .*\nBut torch's DataLoader "
            r"differs from itself .*the dataset \(a sample\[0\] is int \d+ at first, and int \d+ then\)",
        ),
        (
            Odd(Drawn(), 4, collate_fn=MutableFields()),
            r"batch is int 3 with torch, and int -1 with fastq_loader\.\nLikely cause: collate_fn "
            r"\(a batch is int 1 at first, and int 2 then\) keeps state between its calls\.",
        ),
        (
            Odd(Drawn(), 4, collate_fn=str),
            r"the next part is 'batch 2 of epoch 0: batch' with torch, and 'an error' with fastq_loader "
            r"\(TypeError: .*\)\.",
        ),
    ],
)
def test_the_first_difference_has_its_likely_cause(loader: Any, text: str) -> None:
    found = compare(loader)
    assert not found.equal
    assert re.search(text, found.difference or "", re.DOTALL), found.difference
    assert str(found).startswith("Not equal: ")


class Late(Exception):
    """Torch's handler of SIGCHLD, which raises, is called as its text is read."""

    def __str__(self) -> str:
        signal.raise_signal(signal.SIGCHLD)
        return "late"


def late(index: int) -> int:
    if index == 8:
        signal.signal(signal.SIGCHLD, lambda *_: 1 / 0)
        raise Late
    return index


@thorough(but={"number": [5, 0]})
@pytest.mark.processes
@pytest.mark.parametrize(
    ("loader", "batches", "number", "text"),
    [
        (DataLoader(Drawn(), 4, num_workers=1, schedule="dynamic"), None, 6, "schedule='dynamic': values"),
        (DataLoader(Drawn(), 4, pin_memory=True), None, 6, "pin_memory=True: left out; batches stayed"),
        (DataLoader(Endless(), 4), 5, 5, "At most 5 batches of each epoch were read."),
        (DataLoader(Drawn(missing), 4), None, 3, "Both raised FileNotFoundError: 13.png: they were compared"),
        (DataLoader(Drawn(late), 4), None, 2, "Both raised Late: late"),
        (DataLoader(Drawn(missing), 4, errors=Skip()), None, 3, "errors=Skip"),
        (DataLoader([]), None, 0, ""),
    ],
)
def test_notes_name_the_parts_that_were_left_out(
    loader: Any, batches: int | None, number: int, text: str
) -> None:
    found = compare(loader, batches=batches)
    assert (found.equal, found.batches) == (True, number)
    assert any(note.startswith(text) for note in found.notes) if text else not found.notes, found.notes


def dies(index: int) -> Any:
    return os._exit(3) if index == 13 and get_worker_info() else index


@pytest.mark.processes
def test_two_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # torch makes a temporary file when it waits in vain; it stays where the end of a worker interrupts that.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    note = compare(DataLoader(Drawn(dies), 4, num_workers=1), progress=False).notes[0]
    # torch finds the end of its worker in one of several places.
    assert re.match(r"torch's raised (?!WorkerDied)\w+: .*, and fastq_loader's WorkerDied: ", note)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (DataLoader(range(2)), "compare: pass 1, torch: 2 batches, in epoch 1 of 1, each of 2\n"),
        (DataLoader(Stream("tensors", [2])), "whose length is unknown: --batches N, or batches=N, ends it"),
    ],
)
def test_a_long_pass_shows_its_progress(
    loader: Any, text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compare(loader)
    assert not capfd.readouterr().err, "nor does a short one"
    monkeypatch.setattr(comparing, "_SILENCE", 0.0)
    compare(loader)
    assert text in capfd.readouterr().err
    compare(loader, progress=False)
    told = capfd.readouterr().err  # a stream may have no end
    assert told.count("\n") == told.count(text) == ("unknown" in text)


ONES, ROWS = torch.ones(2, 3), torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "batch['a'][1] is int 2 here, and int 3 there"),
        (1, True, "batch is int 1 here, and bool True there"),
        (Point(1, Opaque("x")), Point(1, Opaque("y")), "batch[1].value is str 'x' here, and str 'y' there"),
        (ONES, ONES.double(), "Tensor float32[2, 3], strides (3, 1) here, and torch.Tensor float64"),
        (
            ONES,
            torch.ones(3, 2).T,
            "strides (3, 1) here, and torch.Tensor float32[2, 3], strides (1, 2) there",
        ),
        (torch.tensor(0.0), torch.tensor(-0.0), "batch is 0.0 here, and -0.0 there"),
        (ONES.bfloat16(), -ONES.bfloat16(), "batch[0, 0] is 1.0 here, and -1.0 there"),
        (np.array(["a", "b"]), np.array(["a", "c"]), "batch[1] is b here, and c there"),
        (np.array([None]), np.array([2], dtype=object), "batch[0] is NoneType None here, and int 2 there"),
        ({"a", "b"}, {"b", "a"}, ""),
    ],
)
def test_a_difference_of_batches_has_its_path(one: Any, other: Any, text: str) -> None:
    parts = list(leaves(one)), list(leaves(other))
    found = difference(*parts, ("here", "there"))
    assert (digest(parts[0]) == digest(parts[1])) == (not found)
    assert text in found
    assert bool(text) == bool(found)


class Raises:
    """A sampler, or a dataset, that raises in the middle."""

    def __init__(self, error: type[Exception], at: int = 13) -> None:
        self.error, self.at = error, at

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        yield from range(self.at)
        raise self.error("in the middle")

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise self.error("in the middle")
        return threading.local() if index == 2 else index


def local(samples: Any) -> Any:
    return samples


HANGS = """
    from fastq_loader import compare
    from tests.extras.tools.test_comparing import TORCHS, Hangs
    compare(TORCHS(Hangs(), 2, num_workers=1))
"""


class Hangs(Raises):
    def __init__(self) -> None:
        super().__init__(ValueError)

    def __getitem__(self, index: int) -> Any:
        print("it hangs", flush=True)
        while True:
            time.sleep(60)


class Starts(Hangs):
    def __setstate__(self, state: Any) -> None:
        print("it starts", flush=True)
        time.sleep(60)


@pytest.mark.processes
def test_an_interrupt_ends_a_pass_that_still_starts() -> None:
    script = HANGS.replace("Hangs", "Starts").replace("=1", "=1, multiprocessing_context='spawn'")
    # As in later passes: the start of Python's tracker, with the first spawned process, unblocks SIGINT.
    script = f"\n    from multiprocessing import resource_tracker as it; it.ensure_running(){script}"
    patience = f"\n    from fastq_loader.extras.tools import trials; trials._PATIENCE = {LIMIT}"
    with running_script(patience + script, warm=True) as running:
        running.wait_for("it starts")
        began = time.monotonic()
        os.kill(running.pid, signal.SIGINT)
        assert running.finish().left == ()
        assert time.monotonic() - began < LIMIT


@pytest.mark.processes
def test_a_comparison_that_is_killed_takes_torchs_workers_along() -> None:
    with running_script(HANGS, warm=True) as running:
        running.wait_for("it hangs")
        os.kill(running.pid, signal.SIGKILL)
        assert running.finish(60).left == ()


LOADER, ODD = DataLoader(Drawn(), 4), Odd(Drawn(), 4)


def test_wrong_use_has_a_text_and_an_exit_code(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", f"{__name__}:LOADER", "--epochs", "0"])
    assert "epochs=0 must be" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="torch's DataLoader cannot send collate_fn to workers under 'spawn'"
    ):
        compare(
            DataLoader(
                Drawn(), 4, True, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda x: x
            )
        )
    for wrong, end in ((DataLoader, ", not a class or a function"), ((LOADER,), ""), (iter(LOADER), "")):
        with pytest.raises(TypeError, match=f"compare needs a DataLoader{end}$"):
            compare(wrong)


@pytest.mark.processes
def test_the_shell_has_the_page_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{__name__}:ODD", "--step-seconds", "0.001"]) == 1
    assert capsys.readouterr().out.startswith("Not equal: b")
