"""A worker writes its stacks when it is asked, whatever it is doing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from fastq_loader.workers import stack_dumps
from fastq_loader.workers.stack_dumps import Stacks
from tests.conftest import wait_until
from tests.support.forking import end_of, fork


def dawdle() -> None:
    time.sleep(60)


@pytest.mark.processes
def test_a_process_that_hangs_shows_where_and_one_that_is_stopped_or_gone_does_not() -> None:
    written = Stacks()
    ready, say = os.pipe()

    def hang() -> None:
        stack_dumps.write_on_demand(written.write_end)
        os.write(say, b".")
        dawdle()

    pid = fork(hang)
    os.read(ready, 1)
    assert wait_until(lambda: "in dawdle" in written.of(pid), 5)  # it may still be on its way there
    os.kill(pid, signal.SIGSTOP)
    assert written.of(pid) == "  (it did not write them)"
    os.kill(pid, signal.SIGKILL)
    assert end_of(pid) == -signal.SIGKILL
    assert written.of(pid) == "  (it did not write them)"
    written.close()
    os.close(ready)
    os.close(say)
