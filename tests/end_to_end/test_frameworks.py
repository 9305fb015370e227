"""Frameworks save and restore a loader on their own, because it has `state_dict` and `load_state_dict`.

Runs where they are installed: `pip install -e '.[test,frameworks]'`.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader
from tests.conftest import running_script

pytestmark = [pytest.mark.processes, pytest.mark.frameworks]

BATCHES, EPOCHS = 10, 3


class Augmented(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.rand(1)


@pytest.fixture(scope="module", autouse=True)
def folder_of_the_first_optimizer() -> None:
    """torch makes one in TMPDIR, and leaves it there."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)


def loader(seed: int, workers: Any) -> DataLoader[Any]:
    return DataLoader(
        Augmented(),
        4,
        shuffle=True,
        num_workers=workers,
        schedule="dynamic",
        generator=torch.Generator().manual_seed(seed),
    )


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
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=list(callbacks),
            default_root_dir=tmp_path,
        )
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stop", "workers"), [(3, 2), (10, 0), (13, "auto")])
def test_accelerate_saves_a_loader_that_it_prepared(
    stop: int, workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    monkeypatch.setattr(stateful, "StatefulDataLoader", AlwaysDynamic)

    def prepared(seed: int) -> tuple[Any, Any]:
        told = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=told)
        return accelerator, accelerator.prepare(loader(seed, workers))

    accelerator, one = prepared(1)
    whole: list[Any] = []
    for _ in range(EPOCHS):
        for batch in one:
            whole.append(plain(batch))
            if len(whole) == stop:
                accelerator.save_state(tmp_path)
    accelerator, other = prepared(2)
    accelerator.load_state(tmp_path)
    position = other.base_dataloader.position
    assert position == (stop // BATCHES, stop % BATCHES, stop)
    rest = [plain(batch) for _ in range(position.epoch, EPOCHS) for batch in other]
    assert rest == whole[stop:]


RANK = """
import json, warnings
import accelerate, torch
from torch.utils.data import DistributedSampler
from torchdata import stateful_dataloader
from tests.end_to_end.test_frameworks import AlwaysDynamic, Augmented, plain

warnings.simplefilter("ignore")
prepares = {prepares}
stateful_dataloader.StatefulDataLoader = AlwaysDynamic
told = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=prepares)

def made(seed):
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=told)
    options = {{"shuffle": True}}
    if not prepares:
        ranks = accelerator.num_processes, accelerator.process_index
        options = {{"sampler": DistributedSampler(Augmented(), *ranks)}}
    generator = torch.Generator().manual_seed(seed)
    loader = AlwaysDynamic(Augmented(), 4, num_workers=2, generator=generator, **options)
    if prepares:
        return accelerator, accelerator.prepare(loader)
    accelerator.register_for_checkpointing(loader)
    return accelerator, loader

accelerator, loader = made(1)
whole = []
for batch in loader:
    whole.append(plain(batch))
    if len(whole) == 2:
        accelerator.save_state({folder!r})
accelerator.wait_for_everyone()  # one rank saves what all of them load
accelerator, loader = made(2)
accelerator.load_state({folder!r})
print(json.dumps([whole, [plain(batch) for batch in loader]]))
"""


@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "registered"])
def test_two_ranks_of_accelerate_divide_the_data_and_go_on_with_the_same_bits(
    prepares: bool, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    pytest.importorskip("torchdata.stateful_dataloader")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job["ACCELERATE_USE_CPU"] = "1"
    source = RANK.format(prepares=prepares, folder=str(tmp_path / "checkpoint"))
    with (
        running_script(source, env={**job, "RANK": "0", "LOCAL_RANK": "0"}) as first,
        running_script(source, env={**job, "RANK": "1", "LOCAL_RANK": "1"}) as second,
    ):
        results = [first.finish(100), second.finish(100)]
    seen = []
    for result in results:
        assert result.returncode == 0, result
        whole, rest = json.loads(result.stdout.splitlines()[-1])
        assert rest == whole[2:]
        seen += [index for indices, _ in whole for [index] in indices]
    assert sorted(seen) == list(range(4 * BATCHES))
