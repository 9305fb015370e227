"""The table of planted faults: it covers all guarantees, and its places are there."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.fault_table import FAULTS, Fault
from tests.faults import place_of


def guarantees() -> list[str]:
    """The rows of the README's table, as `Fault.promise` names them."""
    section = (ROOT / "README.md").read_text().partition("## Guarantees")[2].partition("\n## ")[0]
    _, *cells = [row.split("|")[1].strip() for row in section.splitlines() if row.startswith("| ")]
    names: list[str] = []
    subject, number = "", 0
    for cell in cells:
        subject, number = cell or subject, 1 if cell else number + 1
        names.append(f"guarantee: {subject}" + (f" {number}" if number > 1 else ""))
    return names


def rules_and_rows() -> set[str]:
    """The rules and the rows of the contract, as `Fault.promise` names them."""
    rules = re.findall(r"^(\d+)\. \*\*", (ROOT / "fastq_loader/README.md").read_text(), re.MULTILINE)
    rows = re.findall(r"^\| ([A-Z]\d.*?) \|", (ROOT / "tests/README.md").read_text(), re.MULTILINE)
    return {f"rule {rule}" for rule in rules} | {f"row {name}" for row in rows for name in row.split(", ")}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_a_test_file(fault: Fault) -> None:
    assert place_of(fault) == ""
    assert fault.old != fault.new
    assert (ROOT / "tests" / fault.found_by).is_file()
    assert fault.promise in {*guarantees(), *rules_and_rows()}


def test_every_guarantee_has_a_fault() -> None:
    assert len(guarantees()) >= 10
    assert set(guarantees()) <= {fault.promise for fault in FAULTS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
