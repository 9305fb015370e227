"""The id of this process, also after a fork."""

from __future__ import annotations

import os

import pytest

from fastq_loader.system import process_id
from tests.support.forking import end_of, fork


@pytest.mark.processes
def test_it_is_the_systems_in_every_process_and_a_child_leaves_its_parents_loop() -> None:
    parent = process_id.current()
    assert parent == os.getpid()
    process_id.stay_in(parent)

    def check() -> None:
        assert process_id.current() == os.getpid() != parent
        with pytest.raises(SystemExit) as left:
            process_id.stay_in(parent)
        assert left.value.code == 0

    assert end_of(fork(check)) == 0
