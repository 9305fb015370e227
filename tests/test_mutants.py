"""The list of mutants fits the source; whether each is caught is asked with `python -m tests.mutants`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fastq_loader
from tests.mutants import MUTANTS, Mutant, mutated

PACKAGE = Path(fastq_loader.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_still_applies_and_is_still_python(mutant: Mutant) -> None:
    text = mutated(mutant, PACKAGE)
    assert text != (PACKAGE / f"{mutant.module}.py").read_text()
    ast.parse(text)


def test_no_mutant_is_there_twice() -> None:
    assert len({(mutant.module, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
