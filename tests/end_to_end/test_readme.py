"""The first lines of the README run as they stand there, and what its recipes import is there."""

from __future__ import annotations

import re

import pytest

import fastq_loader
from tests.conftest import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.processes
def test_the_first_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert sorted(map(int, re.findall(r"\d+", printed))) == list(range(1000))


def test_recipes_are_python_and_import_what_there_is() -> None:
    names = [
        name
        for block in BLOCKS
        for line in re.findall(r"from fastq_loader import (.*?)(?:  #.*)?\n", block)
        for name in line.split(", ")
    ]
    assert {"DataLoader", "Processes", "ToDevice"} <= {*names} <= {*fastq_loader.__all__}
    for block in BLOCKS:
        compile(block, "README.md", "exec")


@pytest.mark.parametrize(
    "page", ["README.md", "bench/README.md", "fastq_loader/README.md", "tests/README.md"]
)
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
