"""Workers in a Ray cluster give what local ones give, to the bit, whatever dies meanwhile.

The cluster is a real one, of several nodes on this machine. Runs where Ray is installed:
`pip install -e '.[test,ray]'`, then `pytest -m ray`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data

from fastq_loader import DataLoader, Processes, RayWorkers, WorkerReplaced, assert_active
from tests.conftest import running_script, wait_until
from tests.support.datasets import Made, Stream, assert_same
from tests.support.loaders import MANY_WORKERS, seed_all
from tests.support.ray_cluster import Nodes, far_workers, nothing_left, remote_processes

pytest.importorskip("ray", reason="needs the extra 'ray'")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    MANY_WORKERS,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield


def drawn(index: int) -> Any:
    return {"index": index, "large": torch.rand(40_000) + index, "small": torch.rand(2)}


def plain(index: int) -> Any:
    time.sleep(0.002)
    return torch.full((20_000,), float(index)), [index]


def slow(index: int) -> Any:
    time.sleep(0.05)
    return plain(index)


def loader(dataset: Any, workers: Any, number: int, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 4, "shuffle": not isinstance(dataset, Stream), "timeout": 100, **options}
    return DataLoader(dataset, num_workers=number, workers=workers, **options)


def epochs(stops: tuple[int | None, ...], *given: Any, **options: Any) -> list[Any]:
    """The batches of some epochs, each broken off after so many; and what the consumer draws then."""
    seed_all(5)
    with loader(*given, **options) as made:
        found = [batch for stop in stops for batch in islice(made, stop)]
    return [*found, torch.rand(1)]


def device(index: int) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_worker_sees_the_gpu_of_its_own_actor(cluster: Nodes) -> None:
    cluster.resize()
    cluster.add(2, gpus=2)  # there is none: Ray believes what it is told
    workers = RayWorkers(num_gpus=1)
    with loader(Made(device, 8), workers, 2, collate_fn=list, schedule="round_robin") as made:
        assert sorted(made) == [["0"] * 4, ["1"] * 4]


class Counts(Made):
    """Each sample counts itself in an array of the dataset."""

    def __init__(self) -> None:
        super().__init__(device, 8)
        self.array = np.zeros(100_000)

    def __getitem__(self, index: int) -> Any:
        self.array += 1
        return int(self.array[0]), threading.current_thread() is threading.main_thread()


def test_a_worker_has_a_dataset_of_its_own_as_it_was_pickled(cluster: Nodes) -> None:
    """Two of one machine; arrays that Ray itself moves could not be written to."""
    cluster.resize(2)
    dataset = Counts()
    with loader(dataset, "ray", 2, collate_fn=list, schedule="round_robin") as made:
        assert list(made) == [[(at, True) for at in range(1, 5)]] * 2
    assert not dataset.array.any()


def test_a_node_that_joins_gets_work_in_the_same_epoch(cluster: Nodes) -> None:
    cluster.resize(1)
    with loader(Made(plain, 10**6), "ray", 3, schedule="dynamic", shuffle=False) as made:
        batches = iter(made)
        for at in range(10**9):
            next(batches)
            if at == 10:
                assert sum(worker.batches > 0 for worker in made.statistics().workers) == 1
                cluster.add(2)
            if sum(worker.batches > 0 for worker in made.statistics().workers) == 3:
                return


@pytest.mark.parametrize("schedule", ["dynamic", "round_robin"])
def test_batches_are_those_of_local_workers(cluster: Nodes, schedule: str) -> None:
    """So are those of persistent workers (but for random numbers) and of streams, after breaks."""
    cluster.resize(2, 2)
    options, stops = {"persistent_workers": True, "schedule": schedule}, (None, 2, 0, None)
    for dataset in (Made(drawn if schedule == "dynamic" else plain, 70), Stream("large", [9, 2, 5])):
        here = epochs(stops, dataset, "processes", 3, **options)
        assert_same(here, epochs(stops, dataset, "ray", 3, **options))


def kill(pids: list[int], chance: random.Random) -> None:
    if pids:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)


def test_a_warning_names_the_node_and_the_process(cluster: Nodes) -> None:
    cluster.resize(2, 2)
    with loader(Made(slow, 4000), RayWorkers(), 2, schedule="dynamic", shuffle=False) as made:
        batches, found = iter(made), []
        while not all(worker.batches for worker in made.statistics().workers):
            found.append(next(batches))
        workers = far_workers()
        kill(workers, random.Random(3))
        with pytest.warns(
            WorkerReplaced, match=r"was lost with its process on .*Ray's node \w{12}\) \(pid \d+"
        ) as caught:
            found += takewhile(lambda _: not caught.list, batches)
    assert any(f"(pid {pid}" in str(warning.message) for warning in caught for pid in workers)
    assert [int(batch[1][0][0]) for batch in found] == list(range(0, 4 * len(found), 4))


#: What the scripts begin with.
HEAD = """
import random, time, warnings
from fastq_loader import DataLoader, RayWorkers
from tests.end_to_end.test_ray import plain
from tests.support.datasets import Made

warnings.simplefilter("ignore")
"""
CONSUMER = (
    HEAD
    + """
workers = RayWorkers(address={address!r})
loader = DataLoader(Made(plain, 10**6), 4, num_workers=3, schedule="dynamic", workers=workers)
for number, batch in enumerate(loader):
    if number == 30:
        print("running", flush=True)
"""
)


def test_a_consumer_that_is_killed_leaves_nothing_in_the_cluster(cluster: Nodes) -> None:
    cluster.resize(2, 2)
    with running_script(CONSUMER.format(address=cluster.address), warm=True) as script:
        script.wait_for("running", 100)
        assert wait_until(lambda: len(far_workers()) == 3, 100)
        os.kill(script.pid, signal.SIGKILL)
        assert wait_until(lambda: not remote_processes(), 100), remote_processes()


SHUT_DOWN = (
    HEAD
    + """
import ray
chance, kept = random.Random({seed}), []
for in_the_middle in (True, False):
    ray.init(address={address!r}, log_to_driver=False)
    schedule = chance.choice(["dynamic", "round_robin"])
    options = {{"workers": RayWorkers(), "schedule": schedule, "persistent_workers": True}}
    loader = DataLoader(Made(plain, 10**5 if in_the_middle else 80), 4, num_workers=2, **options)
    batches = iter(loader)
    first = [next(batches) for _ in range(chance.choice([1, 20]) if in_the_middle else 20)]
    time.sleep(chance.random())
    ray.shutdown()
    try:
        list(batches if in_the_middle else loader)
    except RuntimeError as error:
        print(error)
    kept.append(loader)
print("saved")
"""
)


def test_a_process_outlives_ray_and_its_loaders_say_what_happened(cluster: Nodes) -> None:
    cluster.resize(2, 2)
    seed = random.randrange(10**6)
    with running_script(SHUT_DOWN.format(address=cluster.address, seed=seed), warm=True) as script:
        result = script.finish(200)
    assert result.returncode == 0, (seed, result)
    *errors, saved = result.stdout.splitlines()
    assert (len(errors), saved) == (2, "saved"), (seed, result)
    assert all("Ray was shut down" in error for error in errors), (seed, errors)


LOCAL = (
    HEAD
    + """
loader = DataLoader(Made(plain, 40), 4, num_workers=2, workers="ray", persistent_workers=True)
for epoch in range(2):
    print([indices.tolist() for _, [indices] in loader])
"""
)


def test_without_a_cluster_one_is_started_on_this_machine_and_ends_with_the_program() -> None:
    with running_script(LOCAL, env={"RAY_ADDRESS": "local", "RAY_TMPDIR": "/tmp"}) as script:
        result = script.finish(100)
    assert result.returncode == 0, result.stderr
    batches = [list(range(first, first + 4)) for first in range(0, 40, 4)]
    assert result.stdout == f"{batches}\n" * 2
    assert not result.left


def train(config: dict[str, Any]) -> None:
    """What each rank of Ray Train does."""
    import ray.train.torch as ray_train

    def loader(cls: Any, sampler: Any, **options: Any) -> Any:
        return cls(range(40), 4, sampler=sampler, num_workers=1, **options)

    def ranks() -> Any:
        return torch.utils.data.DistributedSampler(range(40), seed=3)  # type: ignore[arg-type]

    options = {"schedule": "dynamic", "workers": Processes(max_restarts=3)}
    made = loader(DataLoader, ranks(), **options)
    assert ray_train.prepare_data_loader(made, move_to_device=False) is made
    wrapped = ray_train.prepare_data_loader(made)
    assert_active(wrapped)
    assert wrapped._dataloader is made
    found = [batch.tolist() for batch in wrapped]
    theirs = ray_train.prepare_data_loader(loader(torch.utils.data.DataLoader, ranks()))
    assert found == [batch.tolist() for batch in theirs]
    replaced = ray_train.prepare_data_loader(loader(DataLoader, None, **options))
    if config["ranks"] > 1:
        with pytest.raises(AssertionError, match="sampler=DistributedSampler"):
            assert_active(replaced)
    rank = torch.distributed.get_rank()
    Path(config["folder"], f"{config['ranks']}.{rank}").write_text(repr(found))


TRAINER = """
import ray, ray.train
from ray.train.torch import TorchTrainer
from tests.end_to_end.test_ray import train

ray.init(address={address!r}, log_to_driver=False)
for ranks in (1, 2):
    TorchTrainer(
        train,
        train_loop_config={{"folder": {folder!r}, "ranks": ranks}},
        scaling_config=ray.train.ScalingConfig(num_workers=ranks),
        run_config=ray.train.RunConfig(storage_path={folder!r}),
    ).fit()
"""


def test_ray_train_keeps_a_loader_that_has_a_sampler_for_ranks(cluster: Nodes, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    cluster.resize(2, 2)
    source = TRAINER.format(address=cluster.address, folder=str(tmp_path))
    with running_script(source, warm=True) as script:
        result = script.finish(200)
    assert result.returncode == 0, result
    for ranks in (1, 2):
        drawn = [batch for file in tmp_path.glob(f"{ranks}.*") for batch in eval(file.read_text())]
        assert sorted(index for batch in drawn for index in batch) == list(range(40))


# Nodes die in the end, because Ray places actors on them for a quarter of a minute.


def test_batches_are_the_same_when_a_worker_and_a_node_die(cluster: Nodes) -> None:
    cluster.resize(3, 3)
    dataset = Made(drawn, 400)
    here = epochs((None,), dataset, "processes", 2, schedule="dynamic")
    seed_all(5)
    found = []
    with loader(dataset, "ray", 4, schedule="dynamic") as made, warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkerReplaced)
        for at, batch in enumerate(made):
            found.append(batch)
            if at == 10:
                kill(far_workers(), random.Random(3))
            if at == 30:
                cluster.remove(next(iter(cluster.nodes)))
    assert_same(here, [*found, torch.rand(1)])
