"""What libraries replace of torch's iterators and fetchers is found, and torch's own iterators run then."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

import fastq_loader
from fastq_loader import DataLoader, TorchWorkers
from fastq_loader.epoch.base import LoaderIterator
from fastq_loader.system import torch_patches


def replacement(*_: Any, **__: Any) -> None:
    raise AssertionError("no test calls it")


@pytest.mark.parametrize("name", torch_patches.NAMES)
def test_a_patch_of_each_name_is_found_and_torchs_own_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch_patches.found() == ""
    owner, _, attribute = name.rpartition(".")
    monkeypatch.setattr(attrgetter(owner)(torch.utils.data), attribute, replacement)
    assert torch_patches.found() == f"torch.utils.data.{name} was replaced by {__name__}"


def test_the_names_that_libraries_replace_are_among_them() -> None:
    speechbrain = {f"dataloader._BaseDataLoaderIter.{name}" for name in ("__init__", "_reset")}
    axolotl = {"_utils.fetch._MapDatasetFetcher"}
    assert speechbrain | axolotl <= set(torch_patches.NAMES)


def test_our_install_and_the_users_table_are_no_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(table, torch.Tensor, lambda batch, **_: "mine")
    with fastq_loader.installed(), warnings.catch_warnings():
        warnings.simplefilter("error", TorchWorkers)
        loader = torch.utils.data.DataLoader([torch.ones(2)] * 2, 2)
        assert isinstance(iter(loader), LoaderIterator)
        assert list(loader) == ["mine"]


@pytest.mark.parametrize(
    "more", [{"schedule": "dynamic"}, {"device": "cpu"}, {"errors": fastq_loader.Skip()}]
)
def test_arguments_that_torch_lacks_act_and_the_hint_names_the_patch_that_does_not(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastq_loader.options._issued", set())
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", replacement)
    loader = DataLoader(range(4), 2, **more)
    with pytest.warns(TorchWorkers, match=r"__next__ was replaced by .*, which has no effect here"):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_loaded_state_acts_and_then_torchs_iterators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastq_loader.options._issued", set())
    loader = fastq_loader.StatefulDataLoader(range(8), 2, schedule="round_robin")
    next(iter(loader))
    state = loader.state_dict()
    monkeypatch.setattr(_BaseDataLoaderIter, "__len__", lambda self: 77)
    loader.load_state_dict(state)
    with pytest.warns(TorchWorkers, match="no effect"):
        iterator = iter(loader)
    assert [batch.tolist() for batch in iterator] == [[2, 3], [4, 5], [6, 7]]
    with pytest.warns(TorchWorkers, match=r"torch's own iterators run: .*\.__len__ was replaced by"):
        assert len(iter(loader)) == 77
    with pytest.warns(TorchWorkers, match=r"state_dict\(\) is empty: .* not recorded: .*__len__"):
        assert loader.state_dict() == {}


def test_tune_has_nothing_to_try_where_torchs_iterators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", replacement)
    with pytest.raises(RuntimeError, match=r"__next__ was replaced by .* nothing to try"):
        fastq_loader.tune(DataLoader(range(4)))
