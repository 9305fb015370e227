"""Frameworks save and restore a loader on their own, because it has `state_dict` and `load_state_dict`.

Runs where they are installed: `pip install -e '.[test,frameworks]'`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader

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


def loader(seed: int, workers: int) -> DataLoader[Any]:
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop", [3, 10, 13])
def test_accelerate_saves_a_loader_that_it_prepared(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    monkeypatch.setattr(stateful, "StatefulDataLoader", DataLoader)  # as in the recipe

    def prepared(seed: int) -> tuple[Any, Any]:
        told = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=told)
        return accelerator, accelerator.prepare(loader(seed, 0))

    accelerator, one = prepared(1)
    whole: list[Any] = []
    for _ in range(EPOCHS):
        for batch in one:
            whole.append(plain(batch)[0])
            if len(whole) == stop:
                accelerator.save_state(tmp_path)
    accelerator, other = prepared(2)
    accelerator.load_state(tmp_path)
    position = other.base_dataloader.position
    assert position == (stop // BATCHES, stop % BATCHES, stop)
    rest = [plain(batch)[0] for _ in range(position.epoch, EPOCHS) for batch in other]
    assert rest == whole[stop:]


@pytest.mark.filterwarnings("ignore")
def test_accelerate_saves_a_loader_that_is_registered(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")

    def registered(seed: int) -> tuple[Any, Any]:
        accelerator, of = accelerate.Accelerator(cpu=True), loader(seed, 2)
        accelerator.register_for_checkpointing(of)
        return accelerator, of

    accelerator, one = registered(1)
    whole: list[Any] = []
    for batch in one:
        whole.append(plain(batch))
        if len(whole) == 5:
            accelerator.save_state(tmp_path)
    accelerator, other = registered(2)
    accelerator.load_state(tmp_path)
    assert [plain(batch) for batch in other] == whole[5:]
