"""A host that is started and ended."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fastq_loader.remote.host_process import Host
from fastq_loader.remote.spec import HostSpec
from tests.conftest import run_script
from tests.support.pair import TOKEN
from tests.support.worker_setup import make_plan

pytestmark = pytest.mark.processes


def test_one_that_is_not_needed_any_more_before_it_is_up_ends_quietly(capfd: Any) -> None:
    host = Host(pickle.dumps(HostSpec.of(make_plan(range(3)), TOKEN)), "127.0.0.1")
    host.close()
    assert not host.alive
    assert capfd.readouterr() == ("", "")


def test_one_that_does_not_get_up_is_told_of() -> None:
    host = Host(b"", "127.0.0.1")
    with pytest.raises(OSError, match="ended before it was up"):
        host.address()
    host.close()


def test_its_starter_needs_no_torch() -> None:
    result = run_script(
        """
        import sys, types
        package = sys.modules["fastq_loader"] = types.ModuleType("fastq_loader")
        package.__path__ = [folder + "/fastq_loader" for folder in sys.path]
        import fastq_loader.remote.host_process
        print({"torch", "numpy", "zmq"} & set(sys.modules))
        """
    )
    assert result[:3] == (0, "set()\n", "")
