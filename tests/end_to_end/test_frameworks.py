"""Frameworks keep our loader, and save and restore a `StatefulDataLoader` on their own.

Runs where they are installed: `pip install -e '.[test,frameworks]'`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from fastq_loader import DataLoader, Prefetcher, Processes, StatefulDataLoader, assert_active
from tests.conftest import run_script, running_script

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


def loader(seed: int, workers: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(
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


class OwnArguments(StatefulDataLoader[Any]):
    """A class of the user's, with a constructor that Accelerate does not know."""

    def __init__(self, seed: int, size: int = 45) -> None:
        generator = torch.Generator().manual_seed(seed)
        options: Any = {"schedule": "dynamic", "workers": Processes(max_restarts=3)}
        dataset = Subset(Augmented(), range(size))
        super().__init__(dataset, 4, shuffle=True, num_workers=2, generator=generator, **options)
        self.size = size


RANK = """
import json, os, warnings
import accelerate, torch
from torch.utils.data import DataLoader, DistributedSampler
import fastq_loader, fastq_loader.extras.frameworks.accelerate as integration
from tests.end_to_end.test_frameworks import Augmented, CONFIGS, OwnArguments, Processes, plain

warnings.simplefilter("ignore")
seen = {}

def made(config, loader, stateful=False):
    told = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=stateful, **config)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=told)
    return accelerator, integration.prepare(accelerator, loader)

def epochs(config, loader):
    accelerator, prepared = made(config, loader)
    model, told = torch.nn.Linear(1, 1), []
    for _ in range(2):
        for indices, _ in prepared:
            with accelerator.accumulate(model):
                gathered = accelerator.gather_for_metrics(indices).flatten().tolist()
                told.append([indices.tolist(), gathered, accelerator.sync_gradients, prepared.remainder])
    skipped = accelerator.skip_first_batches(prepared, 2)
    told += [len(prepared), len(skipped), [indices.tolist() for indices, _ in skipped]]
    return told, prepared, skipped

def registered(seed):
    accelerator = accelerate.Accelerator(cpu=True)
    ranks = DistributedSampler(Augmented(), accelerator.num_processes, accelerator.process_index)
    options = {"generator": torch.Generator().manual_seed(seed), "schedule": "dynamic"}
    loader = fastq_loader.StatefulDataLoader(Augmented(), 4, sampler=ranks, num_workers=2, **options)
    accelerator.register_for_checkpointing(loader)
    return accelerator, loader

def resumed(make, stop):
    accelerator, prepared = make(1)
    whole = []
    for batch in prepared:
        whole.append(plain(batch))
        if len(whole) == stop:
            with accelerator.main_process_first():  # all ranks write to the same file
                accelerator.save_state(os.environ["FOLDER"])
    accelerator.wait_for_everyone()
    accelerator, other = make(2)
    accelerator.load_state(os.environ["FOLDER"])
    rest = [plain(batch) for batch in other]
    accelerator.wait_for_everyone()
    assert rest == whole[stop:] and rest, (rest, whole)

for name, config in CONFIGS.items():
    generator = torch.Generator().manual_seed(1)
    theirs = DataLoader(OwnArguments(1).dataset, 4, True, num_workers=2, generator=generator)
    torch.manual_seed(5)
    expected, *_ = epochs(config, theirs)
    torch.manual_seed(5)
    told, *loaders = epochs(config, OwnArguments(1))
    assert told == expected, (name, told, expected)
    for loader in (each.base_dataloader for each in loaders):
        assert type(loader) is OwnArguments and loader.size == 45 and loader.schedule == "dynamic", name
        assert loader.workers == Processes(max_restarts=3), name
        loader.statistics(), loader.position
    seen[name] = [batch[0] for batch in told[:-3]]
    resumed(lambda seed: made(config, OwnArguments(seed, 40), stateful=True), 3)
resumed(registered, 2)
print(json.dumps(seen))
"""

CONFIGS: dict[str, Any] = {
    "plain": {},
    "split": {"split_batches": True},
    "dispatch": {"dispatch_batches": True},
    "dispatch, split": {"dispatch_batches": True, "split_batches": True},
    "seedable": {"use_seedable_sampler": True, "data_seed": 3},
}


def run_ranks(source: str, ranks: int, **env: str) -> list[Any]:
    """Run a script once for each rank, as torchrun does; what each of them printed in the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = [env]
    if ranks > 1:
        env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
        processes = [{**env, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    with contextlib.ExitStack() as stack:
        scripts = [stack.enter_context(running_script(source, env=each)) for each in processes]
        results = [script.finish(150) for script in scripts]
    for result in results:
        assert (result.returncode, result.left) == (0, ()), result
    return [json.loads(result.stdout.splitlines()[-1]) for result in results]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_keeps_ours_and_makes_of_it_what_it_makes_of_torchs(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    pytest.importorskip("torchdata.stateful_dataloader")
    told = run_ranks(RANK, ranks, ACCELERATE_USE_CPU="1", FOLDER=str(tmp_path))
    for name in CONFIGS:
        drawn = {index for seen in told for batch in seen[name] for [index] in batch}
        assert drawn == set(range(45)), name


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_ours_takes_the_arguments_of_torchdatas_class_and_refuses_its_states() -> None:
    torchdatas = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    kinds = StatefulDataLoader, inspect.getmro(StatefulDataLoader)[1]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    assert set(inspect.signature(torchdatas).parameters) <= names
    state = torchdatas(range(4)).state_dict()
    with pytest.raises(ValueError, match="this is not a loader's state"):
        StatefulDataLoader(range(4)).load_state_dict(state)


DDP = """
import json, os, warnings
import lightning, torch
from torch.utils.data import DataLoader
import fastq_loader, fastq_loader.extras.frameworks.fabric
from tests.end_to_end.test_frameworks import Augmented

warnings.simplefilter("ignore")
OPTIONS = {"schedule": "dynamic", "workers": fastq_loader.Processes(max_restarts=3)}
DEVICES = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def training_step(self, batch, _):
        self.seen.append(batch[0].flatten().tolist())
        return self.layer(batch[0]).sum()
    def validation_step(self, batch, _):
        self.seen.append(batch[0].flatten().tolist())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

def fit(cls, **options):
    trainer = lightning.Trainer(
        **DEVICES, max_epochs=2, limit_train_batches=4, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        default_root_dir=os.environ["FOLDER"],
    )
    model = Model()
    train, evaluate = (cls(Augmented(), 4, shuffle, num_workers=2, **options) for shuffle in (True, False))
    trainer.fit(model, train, evaluate)
    return model.seen, [trainer.train_dataloader, trainer.val_dataloaders]

def fabric(cls, **options):
    fabric = lightning.Fabric(**DEVICES)
    fabric.launch()
    loader = fabric.setup_dataloaders(cls(Augmented(), 4, True, num_workers=2, **options))
    return [batch[0].flatten().tolist() for _ in range(2) for batch in loader], [loader]

for run in (fit, fabric):
    expected, _ = run(DataLoader)
    seen, loaders = run(fastq_loader.DataLoader, **OPTIONS)
    assert seen == expected, (run, seen, expected)
    fastq_loader.assert_active(loaders)
    for loader in loaders:
        assert {name: getattr(loader, name) for name in OPTIONS} == OPTIONS, run
        loader.statistics(), loader.close()
print(json.dumps(seen))
"""


def test_lightning_and_fabric_divide_ours_among_two_processes_as_torchs(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs the extra 'frameworks'")
    drawn = [batch for seen in run_ranks(DDP, 2, FOLDER=str(tmp_path)) for batch in seen]
    assert sorted(index for batch in drawn for index in batch) == sorted(2 * [*map(float, range(40))])


def test_accelerate_says_what_it_cannot_keep() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    integration = importlib.import_module("fastq_loader.extras.frameworks.accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(TypeError, match="prepare the loader itself"):
        integration.prepare(accelerator, Prefetcher(loader(1, 0), "cpu"))
    of = loader(1, 0)
    assert type(accelerate.skip_first_batches(of, 3)) is StatefulDataLoader
    of.load_state_dict(of.state_dict())
    with pytest.raises(ValueError, match="load it into the loader that prepare"):
        integration.prepare(accelerator, of)
    asks = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    stateful = accelerate.Accelerator(cpu=True, dataloader_config=asks)
    with pytest.raises(TypeError, match="use_stateful_dataloader=True needs a fastq"):
        integration.prepare(stateful, DataLoader(Augmented(), 4))
    theirs: Any = torch.utils.data.DataLoader(Augmented(), 4)
    with pytest.raises(AssertionError, match=r"Shard, .*: import \S+\.accelerate"):
        assert_active(integration.prepare(accelerator, theirs))


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_keeps_ours_also_when_it_resumes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'frameworks'")
    importlib.import_module("fastq_loader.extras.frameworks.accelerate")
    loaders: list[Any] = []
    seen: list[Any] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, **_: Any) -> dict[str, Any]:
            seen.append(x.tolist())
            return {"loss": self.layer(x).pow(2).mean()}

    class Watched(DataLoader[Any]):
        def __iter__(self) -> Any:
            loaders.append(self.schedule)
            return super().__iter__()

    class Trainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        def get_train_dataloader(self) -> Any:
            rows = [{"x": torch.tensor([float(row)])} for row in range(40)]
            return Watched(rows, 4, num_workers=1, schedule="dynamic")

    def trained(**options: Any) -> list[Any]:
        told = {
            "save_steps": 3,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "num_train_epochs": 2,
        }
        trainer = Trainer(Model(), transformers.TrainingArguments(str(tmp_path), **told))
        trainer.train(**options)
        assert_active(trainer)
        steps = seen.copy()
        seen.clear()
        return steps

    whole = trained()
    assert trained(resume_from_checkpoint=str(tmp_path / "checkpoint-3")) == whole[3:]
    assert loaders == ["dynamic"] * 4


def test_the_examples_in_the_docstrings_run() -> None:
    """In a process of their own: what they import changes accelerate. The others run in test_docstrings."""
    pytest.importorskip("accelerate", reason="needs the extra 'frameworks'")
    result = run_script(
        """
        import doctest
        from fastq_loader import DataLoader
        from fastq_loader.extras.frameworks import accelerate
        print(doctest.testmod(accelerate, extraglobs={"DataLoader": DataLoader}))
        """,
        timeout=60,
    )
    assert result.stdout == "TestResults(failed=0, attempted=3)\n", result
