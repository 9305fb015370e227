"""Too few descriptors or threads are found before they are needed."""

from __future__ import annotations

import _thread
import errno
import resource
from typing import Any

import pytest

from fastq_loader.ipc import limits
from fastq_loader.ipc.limits import expect_descriptors, require_threads
from tests.conftest import open_descriptors


def test_too_few_descriptors_are_an_error_that_says_how_to_get_more() -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 8, allowed[1]))
    try:
        expect_descriptors(5)
        with pytest.raises(OSError, match=r"needs 500 descriptors .* `ulimit -n`") as caught:
            expect_descriptors(500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    assert caught.value.errno == errno.EMFILE
    assert open_descriptors().keys() <= before.keys()


def test_what_runs_on_this_thread_is_no_thread_and_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with gevent's greenlets, which run while this thread sleeps."""
    waiting: list[Any] = []

    class Lock:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

        def acquire(self) -> None: ...

        def release(self) -> None: ...

    monkeypatch.setattr(_thread, "allocate_lock", Lock)
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, _: waiting.append(run))
    monkeypatch.setattr(limits.time, "sleep", lambda _: waiting.pop()() if waiting else pytest.fail("spins"))
    with pytest.raises(RuntimeError, match=r"gevent.*num_workers=0"):
        require_threads(3)
