"""Frameworks save and restore a loader on their own, because it has `state_dict` and `load_state_dict`.

Runs where they are installed: `pip install -e '.[test,frameworks]'`.
"""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader
from tests.conftest import running_script
from tests.support.datasets import Made

pytestmark = [pytest.mark.processes, pytest.mark.frameworks]

BATCHES, EPOCHS = 10, 3


def augmented(index: int) -> Any:
    return torch.tensor([float(index)]), torch.rand(1)


DATASET = Made(augmented, 4 * BATCHES)


@pytest.fixture(scope="module", autouse=True)
def folder_of_the_first_optimizer() -> None:
    """torch makes one in TMPDIR, and leaves it there."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)


def loader(seed: int, workers: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    given: Any = {"shuffle": True, "schedule": "dynamic", "generator": generator}
    return DataLoader(DATASET, 4, num_workers=workers, **given)


def plain(batch: Any) -> list[Any]:
    return [field.tolist() for field in batch]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", [3, 9, 13, 29])
def test_lightning_goes_on_in_the_middle_of_an_epoch(stop: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="needs the extra 'frameworks'")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, _: int) -> Any:
            self.seen.append(plain(batch))
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    class Save(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == stop:
                trainer.save_checkpoint(tmp_path / "checkpoint")

    def fit(model: Any, of: Any, callbacks: Any = (), path: Path | None = None) -> list[Any]:
        without = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        given: Any = {"max_epochs": EPOCHS, "accelerator": "cpu", "default_root_dir": tmp_path}
        trainer = lightning.Trainer(callbacks=list(callbacks), **given, **dict.fromkeys(without, False))
        trainer.fit(model, of, ckpt_path=path, weights_only=False)
        seen: list[Any] = model.seen
        return seen

    whole = fit(Model(), loader(1, 2), [Save()])
    assert len(whole) == BATCHES * EPOCHS
    assert fit(Model(), loader(7, 1), path=tmp_path / "checkpoint") == whole[stop:]


class AlwaysDynamic(DataLoader[Any]):
    """As in the recipe for Accelerate, which makes it anew with torch's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"schedule": "dynamic", **kwargs})


RANK = """
import json, warnings
import accelerate, torch
from torch.utils.data import DistributedSampler
from torchdata import stateful_dataloader
from tests.end_to_end.test_frameworks import DATASET, EPOCHS, AlwaysDynamic, plain

warnings.simplefilter("ignore")
prepares = {prepares}
stateful_dataloader.StatefulDataLoader = AlwaysDynamic
told = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=prepares)

def made(seed):
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=told)
    options = {{"shuffle": True}}
    if not prepares:
        ranks = accelerator.num_processes, accelerator.process_index
        options = {{"sampler": DistributedSampler(DATASET, *ranks)}}
    generator = torch.Generator().manual_seed(seed)
    loader = AlwaysDynamic(DATASET, 4, num_workers={workers!r}, generator=generator, **options)
    if prepares:
        loader = accelerator.prepare(loader)
        return accelerator, loader, loader.base_dataloader
    accelerator.register_for_checkpointing(loader)
    return accelerator, loader, loader

accelerator, loader, _ = made(1)
whole = []
for epoch in range(EPOCHS):
    for batch in loader:
        whole.append(plain(batch))
        if len(whole) == {stop}:
            accelerator.save_state({folder!r})
accelerator.wait_for_everyone()  # one rank saves what all of them load
accelerator, loader, own = made(2)
accelerator.load_state({folder!r})
position = own.position
rest = [plain(batch) for _ in range(position.epoch, EPOCHS) for batch in loader]
print(json.dumps([whole, list(position), rest]))
"""


@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "registered"])
@pytest.mark.parametrize(
    ("ranks", "stop", "workers"), [(1, 3, 2), (1, 10, 0), (1, 13, "auto"), (2, 2, 2)], ids=str
)
def test_ranks_of_accelerate_divide_the_data_and_go_on_with_the_same_bits(
    prepares: bool, ranks: int, stop: int, workers: Any, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    pytest.importorskip("torchdata.stateful_dataloader")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job: dict[str, str] = {}
    if ranks > 1:
        job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "1"}
        job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    folder = str(tmp_path / "checkpoint")
    source = RANK.format(prepares=prepares, folder=folder, stop=stop, workers=workers)
    with ExitStack() as stack:
        scripts = [
            stack.enter_context(running_script(source, env=job and {**job, "RANK": rank, "LOCAL_RANK": rank}))
            for rank in map(str, range(ranks))
        ]
        results = [script.finish(100) for script in scripts]
    seen = []
    for result in results:
        assert result.returncode == 0, result
        whole, position, rest = json.loads(result.stdout.splitlines()[-1])
        assert rest == whole[stop:]
        assert position == [stop // BATCHES, stop % BATCHES, stop] or ranks > 1 or not prepares
        seen += [index for indices, _ in whole[: BATCHES // ranks] for [index] in indices]
    assert sorted(seen) == list(range(4 * BATCHES))
