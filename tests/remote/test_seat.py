"""What runs in an actor; with Ray around it, in `end_to_end`."""

from __future__ import annotations

import base64
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.remote.seat import seat_class
from tests.conftest import run_script


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
