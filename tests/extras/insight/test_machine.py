"""What this process may use, of fake file systems."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fastq_loader.extras.insight.machine import contention, cpus, local_ranks, memory_bytes


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def version_1(root: Path, member: str = "/jobs/mine") -> Path:
    put(root, "proc/self/cgroup", f"4:memory:{member}\n2:cpu,cpuacct:{member}\n1:name=systemd:/\n0::/\n")
    return root


def version_2(root: Path, member: str = "/jobs/mine") -> Path:
    put(root, "proc/self/cgroup", f"0::{member}\n")
    return root


@pytest.fixture(autouse=True)
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def test_without_any_file_the_affinity_and_all_memory_count(tmp_path: Path) -> None:
    assert cpus(tmp_path, {}) == 16.0
    assert memory_bytes(tmp_path) == sys.maxsize // 1024 * 1024


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 16.0),
        ({"": "max 100000"}, 16.0),
        ({"jobs/mine": "250000 100000"}, 2.5),
        ({"jobs": "400000 100000", "jobs/mine": "max 100000"}, 4.0),
        ({"jobs": "50000 100000", "jobs/mine": "300000 100000"}, 0.5),
    ],
)
def test_the_least_quota_of_version_2_counts(tmp_path: Path, quotas: dict[str, str], expected: float) -> None:
    version_2(tmp_path)
    for folder, text in quotas.items():
        put(tmp_path, f"sys/fs/cgroup/{folder}/cpu.max", text + "\n")
    assert cpus(tmp_path, {}) == expected


@pytest.mark.parametrize("name", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(
    ("quota", "expected"), [("-1", 16.0), ("150000", 1.5), ("25000", 0.25), ("nonsense", 16.0)]
)
def test_the_quota_of_version_1_counts(tmp_path: Path, name: str, quota: str, expected: float) -> None:
    version_1(tmp_path)
    put(tmp_path, f"sys/fs/cgroup/{name}/jobs/mine/cpu.cfs_quota_us", quota)
    put(tmp_path, f"sys/fs/cgroup/{name}/jobs/mine/cpu.cfs_period_us", "100000\n")
    assert cpus(tmp_path, {}) == expected


@pytest.mark.parametrize("member", ["/docker/abc/mine", "/", "/../of/another/namespace"])
def test_in_a_container_the_own_cgroup_is_at_the_top(tmp_path: Path, member: str) -> None:
    version_2(tmp_path, member)
    put(tmp_path, "sys/fs/cgroup/cpu.max", "200000 100000")
    assert cpus(tmp_path, {}) == 2.0


@pytest.mark.parametrize(("text", "number"), [("", 1), ("4", 4), ("0", 1), ("-2", 1), ("many", 1), ("²", 1)])
def test_the_ranks_of_a_machine_share_its_cpus(tmp_path: Path, text: str, number: int) -> None:
    assert local_ranks({"LOCAL_WORLD_SIZE": text}) == number
    assert cpus(tmp_path, {"LOCAL_WORLD_SIZE": text}) == 16 / number
    assert local_ranks({}) == 1


def test_available_memory_is_what_the_machine_says(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", "MemTotal:       24684096 kB\nMemAvailable:   1000 kB\nHugePages_Free: 0\n")
    assert memory_bytes(tmp_path) == 1_024_000


def test_a_cgroup_of_version_2_leaves_its_limit_less_what_it_uses(tmp_path: Path) -> None:
    put(version_2(tmp_path), "proc/meminfo", "MemAvailable: 9000 kB\n")
    above, own = "sys/fs/cgroup/jobs", "sys/fs/cgroup/jobs/mine"
    put(tmp_path, f"{own}/memory.max", "max\n")
    put(tmp_path, f"{own}/memory.current", "5000\n")
    assert memory_bytes(tmp_path) == 9_216_000
    put(tmp_path, f"{above}/memory.max", "1000000\n")
    put(tmp_path, f"{above}/memory.current", "600000\n")
    assert memory_bytes(tmp_path) == 400_000
    put(tmp_path, f"{above}/memory.stat", "anon 7\ninactive_file 100000\ntotal_inactive_file 3\n")
    assert memory_bytes(tmp_path) == 500_000
    put(tmp_path, f"{own}/memory.max", "4000\n")
    assert memory_bytes(tmp_path) == 0, "more is used than there may be"


def test_a_cgroup_of_version_1_leaves_its_limit_less_what_it_uses(tmp_path: Path) -> None:
    own = "sys/fs/cgroup/memory/jobs/mine"
    put(version_1(tmp_path), f"{own}/memory.limit_in_bytes", "9223372036854771712\n")
    put(tmp_path, f"{own}/memory.usage_in_bytes", "300\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "2000\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n")
    assert memory_bytes(tmp_path) == 3050


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("some avg10=77.89 avg60=63.82 avg300=41.62 total=1\nfull avg10=0.00 avg60=0.00 total=0\n", 0.7789),
        ("some avg10=?\n", 0.0),
        (None, 0.0),
    ],
)
def test_the_kernel_says_how_long_cpus_are_waited_for(tmp_path: Path, text: str | None, found: float) -> None:
    file = tmp_path / "cpu"
    if text is not None:
        file.write_text(text)
    assert contention(file) == pytest.approx(found)
