"""Files that people open in `__getitem__` give torch's batches, with workers of any start method.

Runs where the libraries are: `pip install -e '.[test,formats]'`; for `streaming` see `.ci/run`.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from fastq_loader import DataLoader
from tests.support.datasets import assert_same
from tests.support.formats import FORMATS, STREAMS, epoch, write_all

pytest.importorskip("h5py", reason="needs the extra 'formats'")

pytestmark = [pytest.mark.processes, pytest.mark.formats, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by another process: this one is forked, and some of the libraries start threads."""
    folder = tmp_path_factory.mktemp("formats")
    writer = multiprocessing.get_context("fork").Process(target=write_all, args=(folder,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    return folder


@pytest.fixture(scope="module")
def torchs(files: Path) -> dict[str, list[Any]]:
    return epoch(torch.utils.data.DataLoader, files, "fork")


@pytest.fixture(scope="module", params=multiprocessing.get_all_start_methods())
def ours(files: Path, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return epoch(DataLoader, files, request.param)


@pytest.mark.parametrize(("name", "module"), [(name, each[0]) for name, each in (FORMATS | STREAMS).items()])
def test_a_format_gives_torchs_batches(
    name: str, module: str, torchs: dict[str, list[Any]], ours: dict[str, list[Any]]
) -> None:
    pytest.importorskip(module, reason="needs the extra 'formats'", exc_type=ImportError)
    assert_same(torchs[name], ours[name])
