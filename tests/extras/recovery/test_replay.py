"""`replay`: a batch of an earlier epoch again, to the bit, and nothing of the loader changes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

from fastq_loader import DataLoader, PermutationSampler, Replace, Skip, StatefulDataLoader
from fastq_loader.extras.tools.command import main
from tests.support.datasets import Stream
from tests.support.loaders import generator_states
from tests.support.samplers import Says
from tests.support.thorough import thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::fastq_loader.BadSampleFound"),
]
ITEMS, SIZE, EPOCHS = 90, 7, 3
BATCHES = -(-ITEMS // SIZE)


class Drawn(Dataset[Any]):
    """Samples that draw from all generators; some of them cannot be read."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float, float]:
        if index in self.bad:
            raise OSError(5, "truncated")
        return index, torch.rand(2), random.random(), np.random.rand()


def make(kind: str, workers: int, **options: Any) -> StatefulDataLoader[Any]:
    dataset = options.pop("dataset", Drawn())
    order: dict[str, Any] = {
        "sequential": {},
        "shuffle": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        "distributed": {"sampler": DistributedSampler(dataset, 2, 0, seed=5)},
        "permutation": {"sampler": PermutationSampler(ITEMS, 4)},
    }[kind]
    return StatefulDataLoader(
        dataset, SIZE, num_workers=workers, **{"schedule": "dynamic", **order, **options}
    )


def run(loader: StatefulDataLoader[Any]) -> tuple[dict[tuple[int, int], Any], dict[int, dict[str, Any]]]:
    """The batches of all epochs, and a state of the middle of each."""
    batches, states = {}, {}
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            batches[epoch, number] = batch
            if number == 2:
                states[epoch] = json.loads(json.dumps(loader.state_dict()))
    return batches, states


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one, other))


@thorough(but={"kind": ["shuffle", "distributed"]})
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=thorough(but={"kind": "shuffle"}))])
@pytest.mark.parametrize("kind", ["sequential", "shuffle", "generator", "distributed", "permutation"])
def test_any_batch_comes_again_to_the_bit(kind: str, workers: int) -> None:
    loader = make(kind, workers)
    batches, states = run(loader)
    before = generator_states(), loader.state_dict(), loader.position
    fresh = make(kind, 0)
    for epoch, number in random.Random(kind).sample(sorted(batches), 12):
        expected = batches[epoch, number]
        assert same(loader.replay(epoch=epoch, batch=number), expected), (epoch, number)
        assert same(fresh.replay(number, state=states[epoch]), expected), (epoch, number)
    assert (generator_states(), loader.state_dict(), loader.position) == before
    assert same(loader.replay(1), batches[EPOCHS - 1, 1]), "of the newest epoch"


def test_samples_that_were_replaced_are_replaced_again_and_one_that_was_left_out_is_named() -> None:
    bad = tuple(range(0, ITEMS, 4))
    loader = make("shuffle", 2, dataset=Drawn(bad), errors=Replace())
    batches, _ = run(loader)
    assert all(same(loader.replay(number, epoch), batch) for (epoch, number), batch in batches.items())
    left_out = make("sequential", 0, dataset=Drawn(tuple(range(SIZE))), errors=Skip())
    list(left_out)
    assert left_out.replay(1)[0].tolist() == list(range(SIZE, 2 * SIZE))
    with pytest.raises(IndexError, match=r"batch=0: .* left out"):
        left_out.replay(0)


def test_with_round_robin_it_says_that_random_numbers_are_others() -> None:
    loader = make("shuffle", 2, schedule="round_robin")
    (batch, *_) = list(loader)
    with pytest.warns(UserWarning, match="with a round_robin schedule they depend on"):
        again = loader.replay(0)
    assert torch.equal(again[0], batch[0])


def test_what_cannot_be_replayed_says_why() -> None:
    loader = make("shuffle", 0)
    with pytest.raises(ValueError, match=r"epoch=None is not one of the epochs .* remembers \(\)"):
        loader.replay(0)
    at_end = [loader.state_dict() for _ in loader][-1]
    between = loader.state_dict()
    for arguments, error, text in (
        ((BATCHES,), IndexError, f"batch={BATCHES}: the epoch had fewer"),
        ((-1,), ValueError, "batch=-1 must be"),
        ((0, 4), ValueError, r"epoch=4 is not one of the epochs that this loader remembers \(0\)"),
        ((0, 4, at_end), ValueError, "saved in the middle of epoch 0"),
        ((0, None, between), ValueError, "saved before epoch 1"),
    ):
        with pytest.raises(error, match=text):
            loader.replay(*arguments)
    with pytest.raises(TypeError, match=r"replay\(state=\) needs a StatefulDataLoader, and this is a DataL"):
        DataLoader(Drawn(), SIZE).replay(0, state=at_end)
    with pytest.raises(TypeError, match="needs a map-style dataset"):
        StatefulDataLoader(Stream("drawn", [3])).replay(0)
    said: StatefulDataLoader[Any] = StatefulDataLoader(Drawn(), SIZE, sampler=Says(ITEMS), schedule="dynamic")
    batches = {number: (batch, said.state_dict()) for number, batch in enumerate(said)}
    assert same(said.replay(5, state=batches[2][1]), batches[5][0])
    with pytest.raises(ValueError, match="this state was saved after batch 4"):
        said.replay(3, state=batches[4][1])


def loader_of_the_shell() -> StatefulDataLoader[Any]:
    torch.manual_seed(0)
    return make("shuffle", 2)


def test_on_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, states = run(loader_of_the_shell())
    path, out, text = tmp_path / "state", tmp_path / "batch.pt", json.dumps(states[1])
    command = ["replay", f"{__name__}:loader_of_the_shell", str(path), "--batch", "5"]
    torch.save(states[1], saved := tmp_path / "state.pt")
    for data in (text.encode(), saved.read_bytes(), b"\n " + text.encode()):
        path.write_bytes(data)
        assert main([*command, "--save", str(out)]) == 0
        assert same(torch.load(out), batches[1, 5])
        assert f"batch[1]: float32[{SIZE}, 2], from 0." in capsys.readouterr().out
    stopped = []
    monkeypatch.setattr(
        "pdb.Pdb.runcall", lambda _, method, self, index: stopped.append(index) or method(self, index)
    )
    assert main([*command, "--pdb"]) == 0
    assert stopped == batches[1, 5][0].tolist()[:1]

    def refused(*command: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            main([*command])
        return capsys.readouterr().err

    torch.save({"model": {}, "loader": states[1]}, checkpoint := tmp_path / "checkpoint")
    damaged = checkpoint.read_bytes()
    path.write_bytes(damaged[:200])
    assert "cannot be read as JSON or with torch.load" in refused(*command)
    for data, expected in (
        (damaged, "a checkpoint that contains one, pass that entry: its keys are 'model', 'loader'"),
        (b"{}", "is empty"),
        (json.dumps({**states[1], "dataset_length": 7}).encode(), "dataset_length"),
    ):
        path.write_bytes(data)
        assert expected in refused(*command)
    assert "dataloader.DataLoader, not a fastq_" in refused("replay", f"{__name__}:torchs_own", *command[2:])
    path.unlink()
    assert "cannot be read as JSON or with torch.load" in refused(*command)


def torchs_own() -> Any:
    return torch.utils.data.DataLoader(range(8))


def test_the_log_of_bad_samples_is_not_written_again(tmp_path: Path) -> None:
    log = tmp_path / "bad"
    loader = make("sequential", 0, dataset=Drawn((1,)), errors=Skip(path=log))
    list(loader)
    text = log.read_text()
    assert loader.replay(0)[0].tolist() == [0, *range(2, SIZE)]
    assert log.read_text() == text != ""
