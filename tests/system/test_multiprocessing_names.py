"""The private names of multiprocessing: all of them are listed, and one that is missing is named."""

from __future__ import annotations

import pytest

from fastq_loader.system import multiprocessing_names


def test_a_name_that_a_release_has_taken_away_is_named() -> None:
    with pytest.raises(ImportError, match=r"Python \d.* has no multiprocessing.process.*_gone, which"):
        multiprocessing_names.check(("multiprocessing.process:BaseProcess._gone",))
