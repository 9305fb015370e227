"""The page's lines for loggers, run as they stand there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastq_loader
from fastq_loader import DataLoader, Skip
from tests.support.datasets import Made

PAGE = Path(fastq_loader.__file__).parent / "extras/insight/README.md"


def bad(index: int) -> int:
    if index == 5:
        raise ValueError("bad")
    return index


class Some(Made):
    def __getitem__(self, index: int) -> Any:
        return bad(index)


@pytest.mark.filterwarnings("ignore:sample 5 of batch 2")
def test_the_lines_for_loggers_log_three_numbers_of_the_newest_epoch() -> None:
    section = PAGE.read_text().partition("## In your logger")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    loader = DataLoader(Some(float, 8), 2, errors=Skip())
    for _ in range(2):
        list(loader)
    logged: list[dict[str, Any]] = [{}, {}, {}]
    names: dict[str, Any] = {"loader": loader}
    names["writer"] = SimpleNamespace(add_scalar=lambda name, value, epoch: logged[0].update({name: value}))
    names["run"] = SimpleNamespace(log=logged[1].update)
    for block in blocks:
        assert len(textwrap.dedent(block).splitlines()) <= 5
        exec(block, names)
    trainer = SimpleNamespace(train_dataloader=loader)
    module = SimpleNamespace(trainer=trainer, log=lambda name, value: logged[2].update({name: value}))
    names["on_train_epoch_end"](module)
    assert logged[0] == logged[1] == logged[2]
    assert logged[0]["data/bad_samples"] == 1
    assert 0 < logged[0]["data/waiting"] <= 1
    assert logged[0]["data/batches_per_second"] == 4 / loader.statistics().per_epoch[-1].seconds
