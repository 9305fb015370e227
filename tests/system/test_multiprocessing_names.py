"""The private names of multiprocessing: all of them are listed, and one that is missing is named."""

from __future__ import annotations

import re

import pytest

from fastq_loader.system import multiprocessing_names
from tests.conftest import ROOT


def test_no_other_module_uses_one_but_packing() -> None:
    used = {
        path.relative_to(ROOT / "fastq_loader").as_posix()
        for path in (ROOT / "fastq_loader").rglob("*.py")
        if re.search(
            r"\._(Popen|popen|bootstrap|inheriting|preload_modules|parent_name|parent_pid|main\(|extra_reducers|"
            r"config|send_signal|flush_std_streams)\b|process\._children",
            path.read_text(),
        )
    }
    assert used == {"system/multiprocessing_names.py", "packing/pickling.py"}


def test_a_name_that_a_release_has_taken_away_is_named() -> None:
    with pytest.raises(ImportError, match=r"Python \d.* has no multiprocessing.process.*_gone, which"):
        multiprocessing_names.check(("multiprocessing.process:BaseProcess._gone",))
