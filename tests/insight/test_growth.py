"""What workers have copied of their dataset's small objects: seen by page, said with the attribute's name."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import Dataset, Subset

import fastq_loader
from fastq_loader import DataLoader
from fastq_loader.insight import growth, machine
from fastq_loader.insight.growth import Growth
from fastq_loader.system.pages import share_alone, shared_and_private


class Paths(Dataset[int]):
    def __init__(self, items: int = 40_000) -> None:
        self.paths = [(f"images/{number:09d}.png", number) for number in range(items)]
        self.labels = {f"{number:09d}": 1.5 * number for number in range(items)}
        self.few = ["a", "b"]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        path, _ = self.paths[index]
        return len(path)


@contextmanager
def forked(dataset: Paths, read: int) -> Iterator[int]:
    """The process id of a fork that has read so many items."""
    done, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        for index in range(read):
            dataset[index]
        os.write(told, b".")
        signal.pause()
    try:
        os.read(done, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(done)
        os.close(told)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what is left is 2 MB."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 20_000_000)


@pytest.mark.processes
def test_the_kernel_says_which_pages_a_process_has_copied() -> None:
    dataset = Paths()
    addresses = [id(item) for item in dataset.paths[::100]]
    with forked(dataset, 0) as pid:
        assert share_alone(pid, addresses) < 0.1
        before = shared_and_private(pid)
    with forked(dataset, len(dataset)) as pid:
        assert share_alone(pid, addresses) > 0.9
        after = shared_and_private(pid)
    assert before is not None
    assert after is not None
    copied = after[1] - before[1]
    assert 5_000_000 < copied < 15_000_000
    assert before[0] - after[0] > copied / 2, "what was copied is not shared any more"
    assert (shared_and_private(pid), share_alone(pid, addresses)) == (None, 0.0), "it has ended"


@pytest.mark.processes
@pytest.mark.usefixtures("little_memory")
def test_half_of_what_is_read_is_half_of_what_is_copied() -> None:
    dataset, found = Paths(), Growth()
    assert found.begin(Subset(dataset, range(4)), multiprocessing.get_context("fork"), 2)
    with forked(dataset, len(dataset) // 2) as half, forked(dataset, len(dataset)) as whole:
        found.look([half, whole])
    [copied] = found.found
    assert (copied.name, copied.what, copied.workers) == ("paths", "list of 40,000 tuples", 2)
    assert 0.7 < copied.each / copied.nbytes < 0.8
    fastq_loader.share(dataset, "paths")
    shared: Any = dataset.paths
    assert copied.nbytes == shared.before
    assert abs(copied.once - shared.nbytes) < 0.1 * shared.nbytes
    assert str(copied) == (
        "`paths`: list of 40,000 tuples, about 6 MB; each of 2 workers has copied "
        f"{copied.each / 1e6:.0f} MB: fastq_loader.share(dataset) takes 1 MB once"
    )


@pytest.mark.processes
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("persistent", [False, True])
def test_diagnose_names_what_every_worker_has_for_itself(start_method: str, persistent: bool) -> None:
    dataset = Paths()
    options = {"multiprocessing_context": start_method, "persistent_workers": persistent}
    with DataLoader(dataset, 1000, num_workers=2, **options) as loader:  # type: ignore[arg-type]
        iterator = iter(loader)
        assert len(list(islice(iterator, 20))) == 20
        live = loader.statistics().workers
        with pytest.warns(fastq_loader.GrowingWorkers):
            assert len(list(iterator)) == 20
        page = " ".join(str(loader.diagnose()).split())
    assert all(worker.private_bytes > 1_000_000 and worker.shared_bytes > 1_000_000 for worker in live)
    assert ("`labels`" in page) == (start_method != "fork"), "it is not read"
    assert "- `paths`: list of 40,000 tuples, about 6 MB; each of 2 workers has copied" in page


@pytest.mark.processes
@pytest.mark.usefixtures("little_memory")
def test_nothing_is_said_of_what_is_shared_or_small(recwarn: pytest.WarningsRecorder) -> None:
    for dataset in (fastq_loader.share(Paths()), Paths(items=1000)):
        with DataLoader(dataset, 1000, num_workers=2) as loader:
            list(loader)
            assert "copied" not in str(loader.diagnose())
    assert not [each for each in recwarn if each.category is fastq_loader.GrowingWorkers]


def test_a_dataset_without_large_containers_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(growth, "containers_of", lambda dataset: looks.append(dataset) or iter(()))
    found = Growth()
    assert not found.begin("dataset", None, 2)
    assert not found.begin("dataset", None, 2)
    found.look([1, 2])
    assert (looks, found.found) == (["dataset"], ())
