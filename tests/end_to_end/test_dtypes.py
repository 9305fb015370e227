"""What arrives of unusual dtypes and defaults, beside torch's loader."""

from __future__ import annotations

import os
import tempfile
import time
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from fastq_loader import DataLoader

pytestmark = pytest.mark.processes

ENUM = np.dtype("u1", metadata={"enum": {"A": 1}})  # as h5py has them
ARRAYS = [
    *(np.zeros(9000, dtype) for dtype in (">i4", ">f2", ">U2", ">M8[ns]", "V7", "i1, >f8, S3", ENUM)),
    np.array(3.0, ">f8"),
    np.frombuffer(bytes(80000), ">f8"),
]


def identity(value: Any) -> Any:
    return value


def on_meta(_: int) -> None:
    torch.set_default_device("meta")


def seen(array: Any) -> Any:
    return array.dtype.descr, array.dtype.metadata, array.flags.writeable, array.shape, array.tobytes()


def test_arrays_of_any_dtype_arrive_as_with_torchs_loader() -> None:
    given: dict[str, Any] = {"collate_fn": identity, "num_workers": 1, "timeout": np.float32(30)}
    torchs, ours = (list(kind(ARRAYS, None, **given)) for kind in (TorchLoader, DataLoader))
    assert list(map(seen, ours)) == list(map(seen, torchs))


def test_the_default_device_that_worker_init_fn_sets_holds_for_collating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch makes it, for that device
    data = [(1, 2.0, np.ones(3), torch.ones(2))] * 2
    for kind in (TorchLoader, DataLoader):
        [batch] = kind(data, 2, num_workers=1, worker_init_fn=on_meta)  # type: ignore[var-annotated, arg-type]
        assert [field.device.type for field in batch] == ["meta", "meta", "meta", "cpu"][: len(batch)], kind


class OpenFile:
    """A batch whose class sends a descriptor, which multiprocessing fetches from the worker on arrival."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return opened, (reduction.DupFd(self.descriptor),)

    def take(self) -> bytes:
        with open(self.descriptor, "rb") as file:
            file.seek(0)
            return file.read()


def opened(duplicate: Any) -> OpenFile:
    return OpenFile(duplicate.detach())


def written(samples: list[int]) -> OpenFile:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(samples))
        file.flush()
        return OpenFile(os.dup(file.fileno()))


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"schedule": "dynamic"}, {"persistent_workers": True}])
def test_workers_stay_until_the_descriptors_of_the_last_batches_were_fetched(options: dict[str, Any]) -> None:
    """As torch's do (tensordict's memory maps of temporary files)."""
    for kind, more in ((torch.utils.data.DataLoader, {}), (DataLoader, options)):
        loader = kind(range(12), 2, num_workers=2, collate_fn=written, **more)
        found = []
        for batch in loader:
            time.sleep(0.02)  # a step, in which workers that may leave would leave
            found.append(list(batch.take()))
        assert found == [[first, first + 1] for first in range(0, 12, 2)]
