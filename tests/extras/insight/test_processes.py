"""The kernel says what memory a process shares, and what it has for itself."""

from __future__ import annotations

import os
import signal

import pytest

from fastq_loader.extras.insight.processes import shared_and_private


@pytest.mark.processes
def test_what_a_fork_writes_is_its_own() -> None:
    memory = bytearray(b"x") * (20 << 20)
    done, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        memory[:: 1 << 10] = bytes(len(memory) >> 10)
        os.write(written, b".")
        signal.pause()
    try:
        os.read(done, 1)
        found = shared_and_private(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(done)
        os.close(written)
    assert found is not None
    assert found[0] > 1 << 20
    assert found[1] > len(memory)
    assert shared_and_private(pid) is None, "it has ended"
