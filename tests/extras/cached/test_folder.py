"""The folder of a cache: kills, copies, damage, full disks, other people. `test_memory` has all else."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastq_loader.extras.cached import folder as folders
from fastq_loader.extras.cached import memory
from fastq_loader.extras.cached.folder import Folder
from fastq_loader.extras.cached.memory import STORED
from tests.extras.cached.test_memory import check, get, put, value_of
from tests.support.forking import end_of, fork, in_child
from tests.support.sandbox import mounted
from tests.support.thorough import seeds

ABOUT = {"function": "read", "version": 1}
LIMIT = 1 << 22


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 30.0)


def opened(path: Path, limit: int = LIMIT, **about: Any) -> Folder:
    return folders.open_at(str(path), {**ABOUT, **about}, limit)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values"


def filled(path: Path) -> None:
    store = opened(path)
    for key in range(40):
        assert put(store, key, value_of(key)) == STORED


# ---- processes and threads ------------------------------------------------------------------------------


@pytest.mark.processes
@seeds(2, 10)
def test_processes_with_threads_that_are_killed_leave_no_wrong_value(path: Path, seed: int) -> None:
    """They inherit the folder from a parent that goes on to use it."""
    rng, store = random.Random(seed), opened(path)
    keys = range(300)

    def work(seed: int, store: Folder) -> None:
        own = random.Random(seed)
        for key in own.sample(keys, len(keys)):
            if get(store, key) is None:
                put(store, key, value_of(key))
            else:
                check(store, [key])

    def child(seed: int) -> None:
        mine = store if seed % 2 else opened(path)
        threads = [threading.Thread(target=work, args=(seed * 10 + each, mine)) for each in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pids = [fork(partial(child, seed * 10 + each)) for each in range(3)]
    work(seed, store)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
        end_of(pid)
        check(store, rng.sample(keys, 30))
    assert end_of(pids[0]) == 0
    work(seed + 1, store)
    assert check(store, keys) == len(keys), f"seed {seed}"


# ---- disks, copies and damage -----------------------------------------------------------------------------


@pytest.mark.processes
def test_a_full_disk_costs_no_value(path: Path) -> None:
    @in_child
    def run() -> None:
        path.mkdir()
        if not mounted(str(path), "size=300k,mode=700"):
            return
        store = opened(path)
        stored = []
        for key in range(200):
            with contextlib.suppress(OSError):
                assert put(store, key, value_of(key)) == STORED
                stored.append(key)
        assert 20 < len(stored) < 150
        assert check(store, range(200)) == len(stored)
        assert check(opened(path), range(200)) == len(stored)

    run()


def test_a_copy_has_the_values_and_a_moved_folder_too(path: Path) -> None:
    filled(path)
    shutil.copytree(path, path.parent / "copy")
    path.rename(path.parent / "moved")
    assert [check(opened(path.parent / name), range(40)) for name in ("copy", "moved")] == [40, 40]


@pytest.mark.processes
@seeds(1, 8)
def test_a_copy_made_while_writing_gives_no_wrong_value(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ready, said = os.pipe()

    def child() -> None:
        store = opened(path)
        for key in range(10**6):
            put(store, key, value_of(key))
            if key == 20:
                os.write(said, b"!")

    pid = fork(child)
    os.read(ready, 1)
    copy = path.parent / "copy"
    shutil.copytree(path, copy)
    os.kill(pid, signal.SIGKILL)
    end_of(pid)
    repaired(opened(copy), range(1000), rng)
    assert check(opened(path), range(20)) == 20
    os.close(ready)
    os.close(said)


@pytest.mark.processes
@seeds(4, 40)
def test_a_damaged_folder_gives_no_wrong_value(path: Path, seed: int) -> None:
    """Bytes of a file were lost, or it was cut short or has grown."""
    filled(path)
    rng = random.Random(seed)
    file = path / "fastq_loader.values"
    size = file.stat().st_size
    with open(file, "r+b") as opened_file:
        if seed % 2:
            opened_file.truncate(rng.randrange(2 * size))
        else:
            for _ in range(rng.choice([1, 30])):
                opened_file.seek(rng.randrange(size))
                opened_file.write(rng.randbytes(rng.randrange(2000)))

    warnings.simplefilter("ignore")
    repaired(opened(path), range(40), rng)
    assert check(opened(path), range(40)) == 40, f"seed {seed}"


def test_values_that_a_power_cut_has_lost_are_stored_anew(path: Path) -> None:
    """The file has their index, and zeros."""
    filled(path)
    file = path / "fastq_loader.values"
    file.write_bytes(file.read_bytes()[: 4096 + (1 << 16)].ljust(file.stat().st_size, b"\0"))
    store = opened(path)
    with pytest.raises(ValueError, match="a value is missing"):
        check(store, [1])
    repaired(store, range(40), random.Random(1))


def repaired(store: Folder, keys: range, rng: random.Random) -> None:
    """What can be read is right; the rest is stored anew."""
    for key in rng.sample(keys, len(keys)):
        there = 0
        with contextlib.suppress(ValueError):
            there = check(store, [key])
        assert there or put(store, key, value_of(key)) == STORED
        assert check(store, [key]) == 1


@pytest.mark.parametrize("number", [memory._LIMIT, memory._LEVELS, memory._LEVELS + 1])
def test_nobody_writes_where_a_damaged_first_page_says(path: Path, number: int) -> None:
    """The index would lie in a value, which another process has compared."""
    filled(path)
    with open(path / "fastq_loader.values", "r+b") as file:
        file.seek(8 * number)
        file.write(((1 << 14) << memory._CHECK_BITS).to_bytes(8, "little"))
    with pytest.warns(UserWarning, match="is begun anew: its first page is damaged"):
        assert check(opened(path), range(40)) == 0


def test_nobody_writes_beyond_the_end_of_a_file_that_was_cut(path: Path) -> None:
    filled(path)
    os.truncate(path / "fastq_loader.values", 5000)
    with pytest.warns(UserWarning, match="is begun anew: the file ends before its index"):
        assert check(opened(path), range(40)) == 0


# ---- whose folder it is -----------------------------------------------------------------------------------


def test_other_files_of_a_folder_are_left_as_they_are(path: Path) -> None:
    path.mkdir()
    (path / "data.mdb").write_text("a file of the user's")
    opened(path)
    folders.remove(str(path))
    with pytest.raises(FileNotFoundError, match=r"fastq_loader\.values"):
        folders.remove(str(path))
    assert [each.name for each in path.iterdir()] == ["data.mdb"]


@pytest.mark.parametrize("left", [None, 0, 4000, 5000])
@pytest.mark.filterwarnings("ignore:.*is begun anew")
def test_an_empty_folder_is_taken_and_what_a_killed_maker_left(path: Path, left: int | None) -> None:
    if left is None:
        path.mkdir()
    else:
        filled(path)
        os.truncate(path / "fastq_loader.values", left)
    assert put(opened(path), 1, value_of(1)) == STORED


@pytest.mark.processes
@seeds(1, 10)
def test_processes_that_make_a_folder_at_once_have_one(path: Path, seed: int) -> None:
    def child(key: int) -> None:
        assert put(opened(path), key, value_of(key)) == STORED

    for pid in [fork(partial(child, key)) for key in range(6)]:
        assert end_of(pid) == 0
    assert check(opened(path), range(6)) == 6


def test_folders_that_others_may_write_to_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(PermissionError, match=r"others may write to .*chmod go-w"):
        opened(path)
    path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="is another user's"):
        opened(path)
    assert not list(path.iterdir())


def test_a_folder_on_a_network_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    device = path.stat().st_dev
    line = f"1 2 {os.major(device)}:{os.minor(device)} / / rw - fuse.sshfs host:/ rw\n"
    real = open
    table = path.parent / "mountinfo"
    table.write_text(line)
    monkeypatch.setattr(
        "builtins.open",
        lambda file, *more, **named: real(table if "mountinfo" in str(file) else file, *more, **named),
    )
    with pytest.raises(ValueError, match=r"is on fuse\.sshfs; use a disk of this machine"):
        opened(path)


def test_a_folder_that_is_removed_serves_those_that_have_it(path: Path) -> None:
    store = opened(path)
    put(store, 1, value_of(1))
    folders.remove(str(path))
    assert not path.exists()
    other = opened(path)
    assert (check(store, [1]), check(other, [1])) == (1, 0)
    assert put(store, 2, value_of(2)) == put(other, 3, value_of(3)) == STORED
    assert (check(store, range(5)), check(other, range(5))) == (2, 1)
