"""The private names of torch are those of a list, and one that is gone is named with torch's release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fastq_loader
from fastq_loader.system import torch_names

PACKAGE = Path(fastq_loader.__file__).parent
#: The rooms whose private names of torch have moved here.
ROOMS = ("packing", "ipc", "reading", "device", "memory", "extras/remote")


def test_these_names_are_used() -> None:
    sparse = "_utils._sparse_tensors_to_validate"
    if hasattr(torch._utils, "_get_sparse_tensors_to_validate"):
        sparse = "_utils._get_sparse_tensors_to_validate"
    assert sorted(torch_names.FOUND) == sorted(
        [
            "Tensor._typed_storage",
            "_C._dispatch_has_kernel_for_dispatch_key",
            "_C._dispatch_key_for_device",
            "_foreach_copy_",
            "cuda._parse_visible_devices",
            "utils.data._utils.collate",
            "utils.data._utils.pin_memory.pin_memory",
            "utils.data.dataloader._sharding_worker_init_fn",
            sparse,
        ]
    )


@pytest.mark.parametrize("room", ROOMS)
def test_other_modules_use_no_private_name_of_torch(room: str) -> None:
    used = {
        f"{path.name}: {line.strip()}"
        for path in (PACKAGE / room).glob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\btorch(\.\w+)*\._(?!_)|from torch[\w.]*\._|from torch[\w.]* import _", line)
    }
    # Other uses are in modules that follow later.
    assert {line for line in used if not line.startswith("generators.py")} == set()


def test_a_name_that_is_gone_is_named() -> None:
    with pytest.raises(
        ImportError, match=rf"^torch {re.escape(torch.__version__)} has no torch\._utils\._gone"
    ):
        torch_names._find("_utils._gone_too", "_utils._gone")


def test_the_list_of_sparse_tensors_is_torchs() -> None:
    assert torch_names.sparse_tensors_to_validate() is torch_names.sparse_tensors_to_validate()
