"""Where workers of ours cannot run, torch's own do: as beside torch's loader, and with one hint."""

from __future__ import annotations

import pytest

from tests.conftest import run_script
from tests.support.sandbox import NEEDED

pytestmark = pytest.mark.processes

#: What takes memfd_create, or another call that workers need, away.
AWAY = {
    "another system": "calls.AVAILABLE = False",
    "memfd_create": "refuse('memfd_create')",
    "eventfd": "refuse('eventfd')",
}
HEAD = """
import multiprocessing, warnings
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as TorchsIterator
from fastq_loader import DataLoader, IteratorInvalid, Prefetcher, TorchWorkers
from fastq_loader.system import calls
from tests.support.sandbox import refuse
"""


def run(source: str, away: str) -> None:
    result = run_script(f"{HEAD}{AWAY[away]}\n{source}", warm=True)
    assert (result.returncode, result.stderr, result.left) == (0, "", ())


def test_drawn_configurations_equal_torch() -> None:
    run(
        """
from tests.end_to_end.test_parity import DIRECTED, check_config, draw_config
for config in (*map(draw_config, range(8)), DIRECTED["broken samples"], DIRECTED["stream stopped early"]):
    check_config(config)
""",
        "another system",
    )


@NEEDED
@pytest.mark.parametrize("away", AWAY)
def test_one_hint_in_a_process_says_that_torchs_workers_run(away: str) -> None:
    run(
        f"""
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        loader = DataLoader(range(8), 4, num_workers=2)
        iterator = iter(loader)
        assert type(iterator) is TorchsIterator
        assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3], [4, 5, 6, 7]]
[hint] = [warning for warning in caught if warning.category is TorchWorkers]
assert "lacks {"eventfd" if away == "eventfd" else "memfd_create"}" in str(hint.message), hint
assert hint.filename == __file__, hint.filename
""",
        away,
    )


def test_they_persist_are_closed_and_are_read_ahead_of() -> None:
    run(
        """
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
assert len(list(ahead)) == 2 and ahead.state_dict() == {}
loader.close()
assert not multiprocessing.active_children()
loader = DataLoader(range(8), 4)
assert len(list(loader)) == 2 and loader.state_dict() != {}
loader.num_workers, loader.prefetch_factor = 2, 2
assert len(list(loader)) == 2 and loader.state_dict() == {}
""",
        "another system",
    )
