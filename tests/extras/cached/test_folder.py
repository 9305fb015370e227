"""The folder of a cache: kills, stopped writers, forks, full disks, boots, copies, damage, other people."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmdb")

from fastq_loader import cached
from fastq_loader.extras.cached import folder as folders
from fastq_loader.extras.cached import mark as marks
from fastq_loader.extras.cached.folder import Folder
from fastq_loader.extras.cached.memory import BUSY, STORED
from tests.extras.cached.test_memory import check, get, left_usable, put, value_of
from tests.support.forking import end_of, fork, in_child
from tests.support.sandbox import mounted
from tests.support.thorough import seeds

ABOUT = {"function": "read", "version": 1}
LIMIT = 1 << 22


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PATIENCE", 30.0)


def opened(path: Path, limit: int = LIMIT, **about: Any) -> Folder:
    return folders.open_at(str(path), {**ABOUT, **about}, limit)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values"


@pytest.fixture
def store(path: Path) -> Iterator[Folder]:
    store = opened(path)
    yield store
    store.finish()


def filled(path: Path) -> None:
    """By a process that ends; clean."""

    def fill() -> None:
        store = opened(path)
        for key in range(40):
            assert put(store, key, value_of(key)) == STORED
        store.finish()

    assert end_of(fork(fill)) == 0


def mark_of(path: Path) -> dict[str, Any]:
    mark: dict[str, Any] = json.loads((path / "fastq_loader.mark").read_text())
    return mark


def is_clean(path: Path) -> bool:
    return mark_of(path)["state"] != marks.using(str(path / "fastq_loader.values"))


def test_what_was_put_is_there_and_it_is_full_when_no_room_is_left(store: Folder) -> None:
    stored = [key for key in range(3000) if put(store, key, value_of(key)) == STORED]
    used, count, limit = store.usage()
    assert limit * 0.97 < used <= limit == LIMIT
    assert check(store, range(3000)) == len(stored) == count
    assert put(store, stored[0], value_of(stored[0])) == BUSY, "it is there"


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


@pytest.mark.processes
def test_a_child_of_a_thread_that_reads_has_no_values(store: Folder) -> None:
    """It cannot know what the other thread of its parent had begun."""
    put(store, 1, value_of(1))

    def child() -> None:
        assert get(store, 1) is None
        assert put(store, 2, value_of(2)) == BUSY
        assert store.usage()[1:] == (0, LIMIT)

    def read(transaction: Any) -> str:
        assert end_of(fork(child)) == 0
        return "read"

    assert store._run(folders.fcntl.LOCK_SH, read) == "read"
    assert check(store, [1]) == 1


def test_who_stores_after_another_program_has_synced_marks_that_first(path: Path) -> None:
    store = opened(path)
    for key in range(2):
        marks.write(store._lock, {**mark_of(path), "state": store._synced()})
        assert put(store, key, value_of(key)) == STORED
        assert not is_clean(path), "its values are not synced"
    store.finish()
    assert is_clean(path)


@pytest.mark.processes
def test_who_has_a_folder_that_was_begun_anew_stores_no_more(path: Path) -> None:
    store = opened(path)
    put(store, 1, value_of(1))

    def child() -> None:
        del folders._opened[marks.identity(str(path / "fastq_loader.mark"))]
        store._close_values()
        (path / "fastq_loader.mark").write_bytes(b"")
        warnings.simplefilter("ignore")
        other = opened(path)
        assert put(other, 2, value_of(2)) == STORED
        os._exit(0)

    assert end_of(fork(child)) == 0
    assert put(store, 3, value_of(3)) == BUSY
    store.finish()
    assert not is_clean(path), "of the other one"


@pytest.mark.processes
def test_a_writer_that_is_stopped_in_its_transaction_holds_nobody_up(
    store: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PATIENCE", 0.05)
    put(store, 1, value_of(1))
    ready, said = os.pipe()

    def child() -> None:
        def stop(transaction: Any) -> None:
            transaction.put(b"half", b"a value")
            os.write(said, b"!")
            os.kill(os.getpid(), signal.SIGSTOP)

        store._run(folders.fcntl.LOCK_EX, stop)

    pid = fork(child)
    os.read(ready, 1)
    assert put(store, 2, value_of(2)) == BUSY
    assert get(store, 1) is None
    assert store.usage()[1:] == (0, LIMIT)
    os.kill(pid, signal.SIGKILL)
    end_of(pid)
    assert put(store, 2, value_of(2)) == STORED
    assert check(store, [1, 2]) == 2
    os.close(ready)
    os.close(said)


@pytest.mark.processes
def test_an_interrupt_at_any_moment_leaves_no_lock(store: Folder) -> None:
    left_usable(store)


def test_a_folder_is_opened_once_in_a_process_and_by_any_name(path: Path) -> None:
    store = opened(path)
    put(store, 1, value_of(1))
    (path.parent / "link").symlink_to(path)
    assert opened(path.parent / "link") is store
    with pytest.raises(ValueError, match="its version is 1, and here it is 2"):
        opened(path, version=2)


# ---- disks and boots ------------------------------------------------------------------------------------


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
        store.finish()
        assert check(opened(path), range(200)) == len(stored)

    run()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("using", "values"),
    [
        (["boot", "device", "inode"], 40),
        (["another boot", "device", "inode"], 0),
        (["boot", 0, 0], 0),
    ],
    ids=str,
)
def test_what_may_not_have_survived_is_begun_anew(path: Path, using: list[Any], values: int) -> None:
    filled(path)
    here = dict(zip(("boot", "device", "inode"), marks.using(path / "fastq_loader.values"), strict=True))
    used = [here.get(each, each) for each in using]
    (path / "fastq_loader.mark").write_text(json.dumps({**mark_of(path), "state": used}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = opened(path)
    assert [f"{path}" in str(each.message) for each in caught] == ([] if values else [True])
    assert check(store, range(40)) == values


@pytest.mark.processes
def test_a_folder_that_does_not_fit_into_memory_is_left_as_it_is(path: Path) -> None:
    filled(path)

    def with_few_addresses() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 34, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"cannot be opened: .*Cannot allocate memory"):
            opened(path)

    mark = mark_of(path)
    (path / "fastq_loader.mark").write_text(json.dumps({**mark, "limit": 1 << 40}))
    assert end_of(fork(with_few_addresses)) == 0
    (path / "fastq_loader.mark").write_text(json.dumps(mark))
    assert check(opened(path), range(40)) == 40


@pytest.mark.processes
def test_a_copy_is_used_unless_its_values_are_of_another_moment_than_its_mark(path: Path) -> None:
    filled(path)
    for copy, stored in (path.parent / "a", 40), (path.parent / "b", 0):
        shutil.copytree(path, copy)
        if not stored:
            assert put(opened(path), 40, value_of(40)) == STORED
            shutil.copy(path / "fastq_loader.values", copy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert check(opened(copy), range(40)) == stored
        assert ["or copied" in str(each.message) for each in caught] == ([] if stored else [True])


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
    with pytest.warns(UserWarning, match="begun anew: .*copied, .* while it was written to"):
        store = opened(copy)
    check(store, rng.sample(range(1000), 100))
    assert check(opened(path), range(20)) == 20
    os.close(ready)
    os.close(said)


@pytest.mark.processes
@seeds(4, 40)
def test_a_damaged_folder_gives_no_wrong_value(path: Path, seed: int) -> None:
    """Bytes of a file were lost, or it was cut short or has grown."""
    filled(path)
    rng = random.Random(seed)
    file = path / f"fastq_loader.{rng.choice(['values', 'values', 'values', 'mark'])}"
    size = file.stat().st_size
    with open(file, "r+b") as opened_file:
        if seed % 2:
            opened_file.truncate(rng.randrange(2 * size))
        else:
            for _ in range(rng.choice([1, 30])):
                opened_file.seek(rng.randrange(size))
                opened_file.write(rng.randbytes(rng.randrange(2000)))

    def look(wanted: int) -> None:
        warnings.simplefilter("ignore")
        store = opened(path)
        assert not wanted or check(store, range(40)) == wanted
        for key in range(40):
            there = 0
            with contextlib.suppress(ValueError, OSError):
                there = check(store, [key])
            if not there:
                with contextlib.suppress(ValueError, OSError):
                    store.add(repr(key).encode(), folders.values.encode(value_of(key)), replace=True)

        store.finish()

    assert [end_of(fork(partial(look, wanted))) for wanted in (0, 0, 40)] == [0, 0, 0], f"seed {seed}"


# ---- whose folder it is -----------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(path: Path) -> None:
    path.mkdir()
    (path / "data.mdb").write_text("a file of the user's")
    with pytest.raises(ValueError, match=r"not a cache of this library, and has a 'data.mdb'"):
        opened(path)
    with pytest.raises(FileNotFoundError, match=r"fastq_loader\.mark"):
        marks.remove(str(path))
    assert [each.name for each in path.iterdir()] == ["data.mdb"]


@pytest.mark.parametrize("left", [[], ["mark"], ["values"], ["mark", "values"]])
@pytest.mark.filterwarnings("ignore:.*is begun anew")
def test_an_empty_folder_is_taken_and_what_a_killed_maker_left(path: Path, left: list[str]) -> None:
    path.mkdir()
    for name in left:
        (path / f"fastq_loader.{name}").touch()
    assert put(opened(path), 1, value_of(1)) == STORED


@pytest.mark.processes
@seeds(1, 10)
def test_processes_that_make_a_folder_at_once_have_one(path: Path, seed: int) -> None:
    def child(key: int) -> None:
        assert put(opened(path), key, value_of(key)) == STORED

    for pid in [fork(partial(child, key)) for key in range(6)]:
        assert end_of(pid) == 0
    store = opened(path)
    assert check(store, range(6)) == 6
    store.finish()


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
    marks.remove(str(path))
    assert not path.exists()
    other = opened(path)
    assert (check(store, [1]), check(other, [1])) == (1, 0)
    assert put(store, 2, value_of(2)) == put(other, 3, value_of(3)) == STORED
    assert (check(store, range(5)), check(other, range(5))) == (2, 1)


def test_without_lmdb_the_error_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    monkeypatch.delitem(sys.modules, folders.__name__)
    monkeypatch.delattr(sys.modules[folders.__package__], "folder")
    with pytest.raises(ImportError, match=r"path= needs lmdb: pip install"):
        cached(value_of, limit="1MB", path=path)
    assert not path.exists()
