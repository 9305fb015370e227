"""Every name that ours stands in for is watched, and only code from elsewhere is a patch."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import dataloader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import fastq_loader
from fastq_loader import DataLoader, TorchWorkers
from fastq_loader.epoch.base import LoaderIterator
from fastq_loader.system import torch_patches

#: Names that work as they do in torch, also if they are patched: ours calls them, inherits them, takes what
#: torch's constructor took, or has nothing of the kind.
NOT_REPLACED = {
    "dataloader": "DataLoader DataLoader.__init__ DataLoader.multiprocessing_context DataLoader.__setattr__ "
    "DataLoader._auto_collation DataLoader._index_sampler DataLoader.__len__ "
    "DataLoader.check_worker_number_rationality",
    "_utils.fetch": "",
    "_utils.pin_memory": "",
    "_utils.worker": "WorkerInfo WorkerInfo.__init__ WorkerInfo.__setattr__ WorkerInfo.__repr__ "
    "get_worker_info _IterableDatasetStopIteration _ResumeIteration _RNG",
    "_utils.collate": "default_convert default_collate collate_tensor_fn collate_numpy_array_fn "
    "collate_numpy_scalar_fn collate_float_fn collate_int_fn collate_str_fn",
}


def replacement(*_: Any, **__: Any) -> None:
    raise AssertionError("no test calls it")


def defined(node: ast.AST, prefix: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If):
            yield from defined(child, prefix)
        elif isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from defined(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("path", NOT_REPLACED)
def test_the_list_has_all_names_of_torchs_modules_that_ours_stands_in_for(path: str) -> None:
    source = inspect.getsource(importlib.import_module(f"torch.utils.data.{path}"))
    watched = {f"{place.path}.{place.name}" for place in torch_patches._PLACES}
    names = set(defined(ast.parse(source)))
    assert names - set(NOT_REPLACED[path].split()) == {
        name.removeprefix(f"{path}.") for name in watched if name.startswith(f"{path}.")
    }


@pytest.mark.parametrize("place", torch_patches._PLACES, ids=lambda place: f"{place.path}.{place.name}")
def test_a_patch_of_each_name_is_found_and_torchs_own_is_none(
    place: torch_patches.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch_patches.found() == ""
    monkeypatch.setattr(place.owner, place.name, replacement)
    named = f"torch.utils.data.{place.path}.{place.name} was replaced by {__name__}.replacement"
    assert torch_patches.found() == named


def wrapped(original: Any) -> Any:
    return functools.wraps(original)(lambda *arguments: original(*arguments))


@pytest.mark.parametrize(
    ("patch", "is_patch"),
    [
        (wrapped, False),
        (lambda original: wrapped(wrapped(original)), False),
        (lambda original: functools.partial(original), True),
        (lambda original: None, True),
    ],
)
def test_instrumentation_that_keeps_the_original_is_no_patch(
    patch: Callable[[Any], Any], is_patch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", patch(_BaseDataLoaderIter.__next__))
    assert bool(torch_patches.found()) == is_patch


def test_code_that_is_replaced_in_its_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader._share_dist_seed, "__code__", (lambda generator, pg: 3).__code__)
    assert "_share_dist_seed" in torch_patches.found()


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
    monkeypatch.setattr("fastq_loader.options._told", set())
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", replacement)
    loader = DataLoader(range(4), 2, **more)
    with pytest.warns(TorchWorkers, match=r"__next__ was replaced by .*, which has no effect here"):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_loaded_state_acts_and_then_torchs_iterators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastq_loader.options._told", set())
    loader = DataLoader(range(8), 2)
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
