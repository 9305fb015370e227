"""Sockets, as far as one process can see them. What goes over them is in `test_wire`."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from fastq_loader.ipc.sockets import ConsumerSocket, endpoint_folder, remove_folder


def policies() -> dict[int, int]:
    """How each thread of this process is scheduled."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        # A thread that was joined is still listed for a moment: whoever joins is woken before.
        with suppress(ProcessLookupError):
            found[int(task.name)] = os.sched_getscheduler(int(task.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="this system schedules otherwise")
@pytest.mark.parametrize("refused", [False, True])
def test_threads_of_the_consumers_socket_wait_for_a_free_core(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    if refused:  # as in some sandboxes
        monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before, folder = policies(), endpoint_folder()
    socket = ConsumerSocket(folder, 1, b"")
    after = policies()
    socket.close()
    remove_folder(folder)
    old = after.keys() & before.keys()
    assert threading.get_native_id() in old
    assert {thread: after[thread] for thread in old} == {thread: before[thread] for thread in old}
    new = {after[thread] for thread in after.keys() - before.keys()}
    assert new == {os.SCHED_OTHER if refused else os.SCHED_BATCH}
