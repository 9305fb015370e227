"""Lambdas, local classes and those of a notebook travel to workers that inherit nothing, and back."""

from __future__ import annotations

import sys
from pickle import PicklingError
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader
from tests.support.thorough import thorough

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_interpreter")]


@thorough(but={"method": "forkserver"})
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
    loader = DataLoader(range(3), collate_fn=lambda b: b, num_workers=1, multiprocessing_context="forkserver")  # type: ignore[arg-type]
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

def run():
    batches = iter(DataLoader(Squares(), num_workers=2, multiprocessing_context="forkserver"))
    print([int(next(batches)) for _ in range(3)])
    try:
        next(batches)
    except Mine as error:
        print(error)
"""


@pytest.mark.parametrize("file", [None, "<stdin>"])  # as in `python - < program.py`
def test_classes_of_an_interactive_main_work(
    file: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cloudpickle")
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(INTERACTIVE, vars(main))
    main.run()
    assert capsys.readouterr().out == "[0, 1, 4]\nthree\n"
