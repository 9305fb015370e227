"""Where workers of ours cannot run, torch's own do: as beside torch's loader, and with one hint."""

from __future__ import annotations

import pytest

from tests.conftest import run_script, torchs_segments_removed
from tests.support.sandbox import NEEDED
from tests.support.thorough import is_thorough

pytestmark = pytest.mark.processes

HEAD = """
import multiprocessing, os, resource, warnings
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as TorchsIterator
from fastq_loader import DataLoader, IteratorInvalid, Prefetcher, StatefulDataLoader, TorchWorkers
from fastq_loader.system import calls
from tests.support.sandbox import mounted, refuse
"""
#: Our workers do not run on another system.
ANOTHER_SYSTEM = "calls.AVAILABLE = False"


def run(source: str, head: str = HEAD) -> None:
    with torchs_segments_removed():
        result = run_script(f"{head}\n{source}", warm=head is HEAD)
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
assert len(list(ahead)) == 2 and not hasattr(ahead, "state_dict")
loader.close()
assert not multiprocessing.active_children()
loader = StatefulDataLoader(range(8), 4, schedule="round_robin")
assert len(list(loader)) == 2 and loader.state_dict() != {{}}
loader.num_workers, loader.prefetch_factor = 2, 2
assert len(list(loader)) == 2 and loader.state_dict() == {{}}
"""
    )


#: As SpeechBrain has it: an epoch begins where a checkpoint was saved.
RECOVERY = """
import functools
from torch.utils.data.dataloader import _BaseDataLoaderIter
def new_init(self, loader, *args, **kwargs):
    self.__old_init__(loader, *args, **kwargs)
    for i in range(getattr(loader, "skip_to", 0)):
        next(self._sampler_iter)
        self._num_yielded = i + 1
def new_reset(self, loader, first_iter=False, *args, **kwargs):
    if not first_iter:
        self._sampler_iter = iter(self._index_sampler)
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called
functools.update_wrapper(new_init, _BaseDataLoaderIter.__init__)
_BaseDataLoaderIter.__old_init__ = _BaseDataLoaderIter.__init__
_BaseDataLoaderIter.__init__ = new_init
_BaseDataLoaderIter._reset = new_reset
"""
#: As axolotl has it: a batch of lists of indices, each of which is packed into one sample.
PACKING = """
import torch.utils.data.dataloader as torchs
from torch.utils.data._utils.fetch import _BaseDatasetFetcher
class _MapDatasetFetcher(_BaseDatasetFetcher):
    def fetch(self, batches):
        return self.collate_fn([[self.dataset[i] for i in batch] for batch in batches])
torchs._utils.fetch._MapDatasetFetcher = _MapDatasetFetcher
"""


@pytest.mark.parametrize(
    ("patch", "named", "before_our_import"),
    [(RECOVERY, "__init__", False), (PACKING, "_MapDatasetFetcher", True)],
)
def test_a_patch_of_torchs_loader_is_honoured_with_one_hint(
    patch: str, named: str, before_our_import: bool
) -> None:
    run(
        f"""
{"" if before_our_import else "import fastq_loader"}
{patch}
import fastq_loader
from fastq_loader import DataLoader, TorchWorkers
class Packs(list):
    def __iter__(self):
        return iter([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [1, 0]]])
def epochs(kind, workers, persistent):
    loader = kind(range(10), batch_sampler=Packs(), num_workers=workers, persistent_workers=persistent)
    if {named!r} == "__init__":
        loader = kind(range(10), 2, num_workers=workers, persistent_workers=persistent)
        loader.skip_to = 2
    seen = [[(iterator := iter(loader)), *(str(batch) for batch in iterator)][1:], iterator._num_yielded]
    loader.skip_to = 0
    return seen, list(map(str, loader))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for workers, persistent in ((0, False), (2, False), (2, True)):
        torchs = epochs(torch.utils.data.DataLoader, workers, persistent)
        assert epochs(DataLoader, workers, persistent) == torchs, torchs
        with fastq_loader.installed():
            assert epochs(torch.utils.data.DataLoader, workers, persistent) == torchs
[hint] = [warning for warning in caught if warning.category is TorchWorkers]
assert {named!r} + " was replaced by __main__" in str(hint.message), hint
assert hint.filename == __file__, hint.filename
""",
        head="import warnings, torch, torch.utils.data\n" if before_our_import else HEAD,
    )
