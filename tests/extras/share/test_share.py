"""`share`: what is replaced, what is refused, and memory that several processes find by a name."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastq_loader import DataLoader, cached, share, sharing_report
from fastq_loader.extras.share import named
from fastq_loader.system import calls
from tests.conftest import open_descriptors, run_script, running_script, wait_until
from tests.support.forking import end_of, fork
from tests.support.thorough import thorough

N = 20_000


class Files(Dataset[Any]):
    def __init__(self, count: int = N) -> None:
        self.samples = [(f"images/{number:08d}.jpg", number % 10) for number in range(count)]
        self.imgs = self.samples
        self.index = {path: number for number, (path, _) in enumerate(self.samples)}
        self.classes = ["cat", "dog"]
        self.odd = {frozenset({1}): 1}
        self.length = count

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> Any:
        path, label = self.samples[at]
        return self.index[path], label


def test_large_containers_are_replaced_and_small_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    dataset, plain = Files(), Files()
    with caplog.at_level(logging.INFO, "fastq_loader"):
        assert share(dataset) is dataset
    assert type(dataset.samples).__name__ == "SharedSequence"
    assert type(dataset.index).__name__ == "SharedMapping"
    assert dataset.imgs is dataset.samples, "as it was before"
    assert type(dataset.classes) is list
    assert dataset.samples == plain.samples
    assert dataset.index == plain.index
    assert f"samples: list of {N:,} items, about " in caplog.text
    assert sharing_report(dataset) in caplog.text
    assert all(each.nbytes < each.before / 2 for each in (dataset.samples, dataset.index))
    assert sharing_report(share(dataset)) == sharing_report(dataset), "twice is once"


def test_named_attributes_are_shared_whatever_their_size() -> None:
    dataset = share(Files(3), "classes", "samples")
    assert type(dataset.classes) is not list
    assert type(dataset.index) is dict
    inner = share(ConcatDataset([Subset(Files(), [1, 2]), Files()]))
    assert type(inner.datasets[0].dataset.samples) is not list  # type: ignore[attr-defined]
    assert "nothing is shared" in sharing_report(Files(1))


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (("samples", "paths"), AttributeError, "Files has no attribute 'paths'; it has classes, imgs"),
        (("samples", "length"), TypeError, "Files.length is a int; only a list, tuple or dict"),
        (("samples", "odd"), TypeError, "Files.odd has a key that is no string, bytes, number"),
    ],
)
def test_an_error_replaces_nothing(names: tuple[str, ...], error: type[Exception], text: str) -> None:
    dataset = Files()
    with pytest.raises(error, match=text):
        share(dataset, *names)
    assert type(dataset.samples) is list


def test_without_memfd_only_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "AVAILABLE", False)
    dataset = Files()
    with pytest.raises(RuntimeError, match=r"share\(name='a'\) needs memfd_create, .*; without a name each"):
        share(dataset, name="a")
    assert type(dataset.samples) is list
    assert type(share(dataset).samples) is not list


@pytest.mark.processes
def test_without_pyarrow_the_error_says_what_to_install() -> None:
    result = run_script(
        """
        import sys
        sys.modules["pyarrow"] = None
        from tests.extras.share.test_share import Files, share
        try:
            share(Files(1))
        except ImportError as error:
            print(error)
        """,
        warm=True,
    )
    assert result.stdout.startswith("share() needs pyarrow (")
    assert "pip install 'fastq-loader[share]'" in result.stdout


class Cached(Files):
    """Its workers share what they have read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.read = cached(super().__getitem__, limit="9MB")

    def __getitem__(self, at: int) -> Any:
        return self.read(at)


@pytest.mark.processes
@thorough(after=1)
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 2)])
def test_workers_read_shared_containers(method: str, workers: int) -> None:
    plain, dataset = Files(), share(Cached())
    options: dict[str, Any] = {"sampler": range(N - 1000, N), "collate_fn": list}
    with DataLoader(dataset, 100, num_workers=workers, multiprocessing_context=method, **options) as shared:
        found = [sample for batch in shared for sample in batch]
    assert found == [plain[at] for at in range(N - 1000, N)]
    # Where a worker loses its CPU in the middle of a store, the other one may do without that.
    assert 900 < dataset.read.statistics().stored <= 1000


# ---- names ------------------------------------------------------------------------------------------

OTHER = """
    import signal
    from tests.extras.share.test_share import Files, share
    dataset = share(Files(), name="a/b")
    assert dataset.samples[7] == ("images/00000007.jpg", 7)
    print(dataset.samples.source is not None, flush=True)
    signal.pause()
"""


def changed(key: str, change: Callable[[Any], Any]) -> Callable[[], Files]:
    def make() -> Files:
        dataset = Files()
        vars(dataset)[key] = change(vars(dataset)[key])
        return dataset

    return make


OTHERS: list[tuple[Callable[[], Files], str]] = [
    (changed("samples", lambda of: of[:-1]), "samples"),
    (changed("samples", lambda of: [*of[:-1], ("b", 1)]), "samples"),
    (changed("samples", tuple), "samples"),
    (changed("classes", lambda of: [f"{number:010}" for number in range(N)]), "classes"),
    (changed("index", len), "index"),
]


def inodes(pid: int | str = "self") -> set[int]:
    """Of the memory of this kind that a process holds."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # it was the descriptor of the listing
            if "fastq_loader.mapped" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    return found


@pytest.mark.processes
def test_the_second_of_a_name_finds_the_memory_of_the_first_and_sigkill_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before, descriptors = inodes(), open_descriptors()
    with running_script(OTHER, env={"TMPDIR": str(tmp_path)}, warm=True) as other:
        other.wait_for("True\n")
        dataset = share(Files(), name="a/b")
        assert dataset.samples == Files().samples
        (inode,) = inodes() - before
        assert inode in inodes(other.pid)
        for other_data, text in OTHERS:
            with pytest.raises(
                ValueError, match=rf"share\(name='a/b'\): .* something else than {text} under this name"
            ):
                share(other_data(), name="a/b")
        os.kill(other.pid, signal.SIGKILL)
        other.finish()
    again = share(Files(), name="a/b")
    assert inodes() - before == {inode}, "this process has held it on"
    del dataset, again
    assert wait_until(lambda: inodes() == before, 30)
    assert open_descriptors().keys() <= descriptors.keys()
    new = share(Files(), name="a/b")
    assert inodes() - before != {inode}, "nobody held it any more"
    assert len(list(tmp_path.glob("*.shared"))) == 1
    del new
    gc.collect()
    assert list(tmp_path.iterdir()) == [], "the last one has taken the file along"


@pytest.mark.processes
def test_a_forked_child_keeps_no_lock_and_a_stopped_process_one_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "name")
    with named._registry(path):
        pid = fork(signal.pause)  # by another thread; it has the file open
    monkeypatch.setattr(named, "PATIENCE", 0.1)
    with named._registry(path), pytest.raises(TimeoutError, match=r"name locked for 0\.1 s"):
        named._registry(path).__enter__()
    os.kill(pid, signal.SIGKILL)
    assert end_of(pid) == -signal.SIGKILL


def test_a_file_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match="is another user's; use another name"):
        share(Files(), name="train")
