"""One measurement in a process of its own: what it gives, what it leaves alone, how it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, RandomSampler, get_worker_info

from fastq_loader import DataLoader, ToDevice
from fastq_loader.epoch import resources
from fastq_loader.extras.insight.model import Setting
from fastq_loader.extras.tools import trials
from fastq_loader.extras.tools.trials import Measured
from tests.conftest import descendants, running_script
from tests.support.datasets import Made
from tests.support.loaders import image
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes

TWO = Setting(2, 2)


class MutableFields(Dataset[Any]):
    def __init__(self) -> None:
        self.read = 0
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.rand(2, generator=self.generator) + index


class Sleeping(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        os.write(1, b"asleep\n")  # in one piece, beside another worker
        time.sleep(60)
        return index


class Failing(Dataset[Any]):
    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        self.fail()
        return index


def refuse() -> None:
    raise KeyError("no such file")


def vanish() -> None:
    if get_worker_info() is None:
        os._exit(7)


def measure(
    loader: DataLoader[Any], setting: Setting = TWO, step: float = 0.0, seconds: float = 0.05
) -> Measured:
    return trials.measure(loader, setting, step, seconds, 60.0)


class Special(DataLoader[Any]):
    def __init__(self, dataset: Any, colour: str, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.colour = colour


def test_a_loader_like_another_one_differs_in_its_setting_only() -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": print}
    special = Special(Made(float, 8), "red", timeout=9, **options)
    new = trials.like(special, Setting(1, 4, dynamic=True, start_method="spawn"))
    assert (type(new), new.colour, new.timeout, new.worker_init_fn) == (Special, "red", 9, print)  # type: ignore[attr-defined]
    assert (new.num_workers, new.prefetch_factor, new.schedule) == (1, 4, "dynamic")
    assert new.multiprocessing_context.get_start_method() == "spawn"
    assert (special.num_workers, special.prefetch_factor, special.schedule) == (2, 2, "round_robin")
    assert trials.like(special, Setting(2, 2)).multiprocessing_context is special.multiprocessing_context


@thorough(after=1)
@pytest.mark.parametrize(("workers", "persistent"), [(2, True), (0, False), (2, False), (0, True)])
def test_it_measures_the_rate_and_the_costs_of_a_batch(workers: int, persistent: bool) -> None:
    loader: DataLoader[Any] = DataLoader(Made(image, 60), 4, num_workers=2, persistent_workers=persistent)
    found = measure(loader, Setting(workers, 2), step=0.001, seconds=0.1)
    assert 0 < found.batches * 0.001 <= found.seconds
    assert found.costs is not None
    assert (found.costs.step, found.costs.load > 0) == (0.001, True)
    if workers:
        assert found.costs.batch_bytes >= 4 * 196_608
        assert found.worker_bytes > 1 << 20
    else:
        assert found.costs.batch_bytes == found.worker_bytes == 0


def test_a_transform_on_the_host_counts() -> None:
    slow = ToDevice("cpu", transform=lambda batch: time.sleep(0.05) or batch)
    found = measure(DataLoader(Made(float, 60), 4, device=slow), Setting(0, 2), seconds=0.2)
    assert found.seconds >= found.batches * 0.05


def test_threads_of_torch_in_the_consumer_do_not_stop_it() -> None:
    torch.set_num_threads(4)
    try:
        torch.ones(1 << 20).add_(1).sum()  # starts them
        dataset = Made(lambda index: float(torch.ones(1 << 20).add_(index).sum()), 16)
        assert measure(DataLoader(dataset, 4, num_workers=0), Setting(0, 2)).batches > 0
    finally:
        torch.set_num_threads(1)


SQUARES = """
class Squares:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index**2
"""


def test_a_spawned_trial_has_the_classes_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle")
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(SQUARES, vars(main))
    loader = DataLoader(main.Squares(), 2, num_workers=1, multiprocessing_context="spawn")
    assert measure(loader, Setting(0, 2, start_method="spawn")).batches > 0


def test_an_empty_dataset_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="the loader gives no batch: its dataset is empty") as raised:
        measure(DataLoader(Made(float, 0), num_workers=1), Setting(1, 2))
    assert "DataLoader worker" not in "".join(getattr(raised.value, "__notes__", ()))


def test_the_loader_and_its_parts_stay_as_they_were() -> None:
    dataset, generator = MutableFields(), torch.Generator().manual_seed(1)
    sampler = RandomSampler(dataset, generator=generator)
    loader: DataLoader[Any] = DataLoader(dataset, 4, sampler=sampler, generator=generator)
    next(iter(loader))
    read, record = dataset.read, resources.of(loader).record
    states = [each.get_state() for each in (generator, dataset.generator, torch.default_generator)]
    position = loader.position
    measure(loader, Setting(1, 2))
    after = [each.get_state() for each in (generator, dataset.generator, torch.default_generator)]
    assert all(map(torch.equal, states, after))
    assert dataset.read == read
    assert resources.of(loader).record is record
    assert loader.position == position
    assert loader.statistics().epochs == 1


def test_an_error_of_the_users_code_is_raised() -> None:
    with pytest.raises(KeyError, match="no such file"):
        measure(DataLoader(Failing(refuse), num_workers=2))


def test_a_process_that_dies_says_how() -> None:
    with pytest.raises(RuntimeError, match="the process of a trial exited with code 7 before it sent"):
        measure(DataLoader(Failing(vanish)), Setting(0, 2))


def test_one_that_takes_too_long_is_ended_with_its_workers() -> None:
    before = descendants().keys()
    with pytest.raises(TimeoutError, match="too few batches in 0 s"):
        trials.measure(DataLoader(Sleeping(), num_workers=2), TWO, 0.0, 0.1, 0.3)
    assert descendants().keys() <= before


@thorough(after=1)
@pytest.mark.parametrize(("end", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGKILL)])
def test_it_ends_with_its_workers_when_the_consumer_is_interrupted_or_dies(end: Any, number: int) -> None:
    with running_script(
        """
        import os
        from fastq_loader import DataLoader
        from tests.conftest import acquired, belongings, wait_until
        from tests.extras.tools.test_trials import TWO, Sleeping, measure
        before = belongings()
        try:
            measure(DataLoader(Sleeping(), num_workers=2))
        except KeyboardInterrupt:
            print("interrupted", wait_until(lambda: not acquired(before), 30))
        """,
        warm=True,
    ) as script:
        script.wait_for("asleep\nasleep\n")
        assert len(script.processes()) == 4, "it, the trial and two workers"
        end(script.pid, number)
        result = script.finish()
    code, said = (-9, "") if number == signal.SIGKILL else (0, "interrupted True\n")
    assert result[:3] == (code, f"asleep\nasleep\n{said}", "")
    assert not result.left
