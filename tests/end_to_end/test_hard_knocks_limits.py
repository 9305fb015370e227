"""Limits, sandboxes, no /proc: what torch's loader bears, ours bears."""

from __future__ import annotations

import subprocess
import textwrap
from functools import cache

import pytest

from fastq_loader.memory.arena import AVAILABLE
from tests.conftest import run_script
from tests.support.sandbox import NEEDED, optional

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

START = "from tests.support.tight import *\nfrom tests.support.sandbox import *\n"
ALL_KINDS = """
data = Numbered(12, 300_000)
for loader, options in [
    (BOTH[0], {}),
    (OURS, {}),
    (OURS, {"schedule": "dynamic", "workers": fastq_loader.Processes(2)}),
    (OURS, {"multiprocessing_context": METHOD}),
]:
    kept = list(loader(data, batch_size=None, num_workers=3, **options))
    assert len(kept) == 12 and all(is_number(batch, number) for number, batch in enumerate(kept))
"""


def run(source: str, prefix: tuple[str, ...] = ()) -> None:
    """Run a script that must end well. Nothing is said on the way but by torch, which misses /proc."""
    source = f"{START}warnings.simplefilter('ignore')\n{textwrap.dedent(source)}"
    result = run_script(source, timeout=90, prefix=prefix, warm=not prefix)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    said = [line for line in result.stderr.splitlines() if not line.startswith("Error in cpuinfo: ")]
    assert said == []
    assert result.left == ()


def test_a_kept_batch_of_each_epoch_takes_its_own_bytes_of_address_space_and_no_descriptor() -> None:
    run(
        """
        def taken():
            ours = [line.split()[0].split("-") for line in open("/proc/self/maps") if "memfd:fastq" in line]
            mapped = sum(int(end, 16) - int(start, 16) for start, end in ours)
            return mapped, len(os.listdir("/proc/self/fd"))

        nothing, descriptors = taken()
        kept = []
        for epoch in range(8):
            kept += [b for b in OURS(Numbered(4, 1_000_000), batch_size=None, num_workers=2) if b[0] == 3]
            mapped, opened = taken()
            assert mapped <= len(kept) * 1.25 * 1_000_000 and opened == descriptors, (epoch, mapped, opened)
        assert len(kept) == 8 and all(is_number(batch, 2) for batch in kept)
        kept.clear()
        assert taken() == (nothing, descriptors) == (0, descriptors)
        """
    )


@pytest.mark.parametrize("mega", [2, 40])
def test_where_files_are_limited_small_batches_come_as_ever_and_large_ones_say_why_not(mega: int) -> None:
    run(
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, ({mega} << 20, {mega} << 20))
        for loader in BOTH:
            for nbytes in (8, 10_000, {mega} * 20_000):
                loading = loader(Numbered(40, nbytes), batch_size=None, num_workers=2)
                assert all(is_number(batch, number) for number, batch in enumerate(loading))
        try:
            list(OURS(Numbered(4, {mega} << 20), batch_size=None, num_workers=2))
        except MemoryError as error:
            assert "ulimit -f" in str(error)
        else:
            raise AssertionError("a limit that is none")
        """
    )


def test_little_memory_for_data_need_not_hold_the_stacks_of_all_workers() -> None:
    run(
        """
        used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + (80 << 20), resource.RLIM_INFINITY))
        for loader in BOTH:
            loading = loader(Numbered(8, 10_000), batch_size=None, num_workers=4)
            assert all(is_number(batch, number) for number, batch in enumerate(loading))
        """
    )


@NEEDED
def test_calls_that_a_sandbox_may_refuse_are_done_without() -> None:
    run(f"refuse(*{optional()!r})\nMETHOD = 'fork'\n{ALL_KINDS}")


@cache
def can_mount() -> bool:
    return not subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode


def test_without_proc_all_is_as_ever() -> None:
    if not can_mount():
        pytest.skip("this user may not mount")
    hide = 'mount -t tmpfs none /proc && exec "$@"'
    run(f"METHOD = 'spawn'\n{ALL_KINDS}", prefix=("unshare", "-m", "sh", "-c", hide, "sh"))
