"""Where workers of ours cannot run, torch's own do: as beside torch's loader, and with one hint."""

from __future__ import annotations

import pytest

from tests.conftest import run_script
from tests.support.sandbox import NEEDED
from tests.support.thorough import is_thorough

pytestmark = pytest.mark.processes

HEAD = """
import multiprocessing, os, resource, warnings
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as TorchsIterator
from fastq_loader import DataLoader, IteratorInvalid, Prefetcher, TorchWorkers
from fastq_loader.system import calls
from tests.support.sandbox import mounted, refuse
"""
#: Our workers do not run on another system.
ANOTHER_SYSTEM = "calls.AVAILABLE = False"


def run(source: str) -> None:
    result = run_script(f"{HEAD}\n{source}", warm=True)
    assert (result.returncode, result.stderr, result.left) == (0, "", ())


def test_drawn_configurations_equal_torch() -> None:
    run(
        f"""
{ANOTHER_SYSTEM}
from tests.end_to_end.test_parity import DIRECTED, check_config, draw_config
configs = map(draw_config, range({8 if is_thorough else 1}))
for config in (*configs, DIRECTED["broken samples"], DIRECTED["stream stopped early"]):
    check_config(config)
"""
    )


@NEEDED
def test_one_hint_in_a_process_says_that_torchs_workers_run() -> None:
    """On another system, where a call that workers need is refused, and where something else is missing."""
    run(
        f"""
def check(lacks):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loader = DataLoader(range(8), 4, num_workers=2)
            iterator = iter(loader)
            assert type(iterator) is TorchsIterator
            assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    [hint] = [warning for warning in caught if warning.category is TorchWorkers]
    assert f"lacks {{lacks}}" in str(hint.message), hint
    assert hint.filename == __file__, hint.filename

def limited():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))

def hide():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch says that it cannot read /proc/cpuinfo
    mounted("/proc") or os._exit(0)  # not every user may mount

takes_away = {{name: lambda name=name: refuse(name) for name in ("eventfd", "memfd_create", "pidfd_open")}}
takes_away["address space (ulimit -v)"] = limited
takes_away["/proc"] = hide
children = []
for lacks, take_away in takes_away.items():
    children.append(os.fork())
    if not children[-1]:
        take_away()
        check(lacks)
        os._exit(0)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
{ANOTHER_SYSTEM}
check("memfd_create")
"""
    )


def test_they_persist_are_closed_and_are_read_ahead_of() -> None:
    run(
        f"""
{ANOTHER_SYSTEM}
warnings.simplefilter("ignore", TorchWorkers)
loader = DataLoader(range(8), 4, num_workers=2, persistent_workers=True)
iterator = iter(loader)
first = [worker.pid for worker in iterator._workers]
assert len(list(iterator)) == len(list(loader)) == 2
assert [worker.pid for worker in loader._iterator._workers] == first
assert "2 workers running" in repr(loader)
iterator = iter(loader)
next(iterator)
loader.close()
assert not multiprocessing.active_children() and "no workers running" in repr(loader)
try:
    next(iterator)
except IteratorInvalid as error:
    assert "its loader was closed" in str(error)
else:
    raise AssertionError("it goes on")
ahead = Prefetcher(loader, "cpu")
assert len(list(ahead)) == 2 and ahead.state_dict() == {{}}
loader.close()
assert not multiprocessing.active_children()
loader = DataLoader(range(8), 4)
assert len(list(loader)) == 2 and loader.state_dict() != {{}}
loader.num_workers, loader.prefetch_factor = 2, 2
assert len(list(loader)) == 2 and loader.state_dict() == {{}}
"""
    )
