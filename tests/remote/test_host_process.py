"""A host that is started and ended."""

from __future__ import annotations

import base64
import importlib
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.remote.host_process import Host, seat_class
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


def test_an_actor_says_where_it_is_and_what_devices_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "f" * 56)
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
    ray: Any = SimpleNamespace(get_runtime_context=lambda: context, util=util)
    monkeypatch.setattr(importlib, "import_module", lambda name: {"ray": ray}[name])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:1")
    node, address, devices = seat_class()().where()
    assert (node, address) == ("f" * 56, "10.0.0.7")
    assert devices.items() >= {"CUDA_VISIBLE_DEVICES": "1", "ONEAPI_DEVICE_SELECTOR": "level_zero:1"}.items()
    assert "PATH" not in devices


@pytest.mark.processes
def test_an_actor_needs_neither_this_package_nor_torch() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    sent = base64.b64encode(cloudpickle.dumps(seat_class()))
    result = run_script(
        f"""
        import base64, pickle, sys
        pickle.loads(base64.b64decode({sent!r}))().end()
        print(sorted({{"fastq_loader", "torch", "ray"}} & set(sys.modules)))
        """
    )
    assert result[:3] == (0, "[]\n", "")
