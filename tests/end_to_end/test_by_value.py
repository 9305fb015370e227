"""Lambdas, local classes and those of a notebook travel to workers that inherit nothing, and back."""

from __future__ import annotations

import subprocess
import sys
from pickle import PicklingError
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_local_classes_and_lambdas_work_and_come_back(method: str) -> None:
    pytest.importorskip("cloudpickle")

    class Sample:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Odd(ValueError):
        pass

    class Local(Dataset[Any]):
        array = np.arange(20_000)

        def __getitem__(self, at: int) -> Any:
            if at == 5:
                raise Odd("five", at)
            return Sample(torch.full((20_000,), int(self.array[at])))

        def __len__(self) -> int:
            return 8

    seen: list[Any] = []
    init = lambda worker: seen.append(worker)  # noqa: E731
    given: Any = {"collate_fn": lambda samples: samples, "worker_init_fn": init}
    with DataLoader(Local(), 2, num_workers=2, multiprocessing_context=method, **given) as loader:
        batches = iter(loader)
        for number in range(2):
            batch = next(batches)
            assert [type(each) for each in batch] == [Sample, Sample], "the class itself"
            assert [int(each.value[-1]) for each in batch] == [2 * number, 2 * number + 1]
        with pytest.raises(Odd, match=r"\('five', 5\)"):
            next(batches)
        assert int(next(batches)[1].value[0]) == 7
    assert not seen


def test_without_cloudpickle_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr("fastq_loader.packing.pickling.find_spec", lambda name: None)
    loader = DataLoader(range(3), collate_fn=lambda b: b, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    with (
        pytest.warns(UserWarning, match="Got pickle error"),
        pytest.raises(
            (AttributeError, TypeError, PicklingError), match=r"collate_fn .*cloudpickle \(pip install"
        ),
    ):
        iter(loader)


INTERACTIVE = """
from fastq_loader import DataLoader

class Squares:  # of a __main__ that is no file, as a notebook's
    def __getitem__(self, at):
        if at == 3:
            raise Mine("three")
        return at * at
    def __len__(self):
        return 4

class Mine(Exception):
    pass

for method in ("spawn", "forkserver"):
    batches = iter(DataLoader(Squares(), num_workers=2, multiprocessing_context=method))
    print([int(next(batches)) for _ in range(3)])
    try:
        next(batches)
    except Mine as error:
        print(error)
    del batches
"""


#: Runs its argument in a kernel, and prints what that prints.
KERNEL = """
import jupyter_client, sys
with jupyter_client.run_kernel() as kernel:
    show = lambda message: print(message["content"].get("text", ""), end="")
    kernel.execute_interactive(sys.argv[1], timeout=60, output_hook=show)
"""


@pytest.mark.parametrize("where", ["-c", "kernel"])
def test_classes_of_an_interactive_main_work(where: str) -> None:
    pytest.importorskip("cloudpickle")
    if where == "kernel":
        pytest.importorskip("ipykernel", reason="pip install ipykernel tries it in a notebook's kernel")
    command = [sys.executable, "-c", *([KERNEL] if where == "kernel" else []), INTERACTIVE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.split("\n")[:4] == ["[0, 1, 4]", "three"] * 2, done
