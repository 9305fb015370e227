"""What a host needs to know of a pool of workers, and how it gets there.

Made in the consumer; read in a host. It is pickled by cloudpickle, which takes what was defined in a notebook
or a script along, and nothing that cannot leave the machine.
"""

from __future__ import annotations

import pickle
import platform
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import UnpicklableError
from fastq_loader.ipc.messages import VERSION
from fastq_loader.remote.link import Tls
from fastq_loader.workers.config import Plan
from fastq_loader.workers.payload import Payload


def versions() -> dict[str, str]:
    """What has to be the same in the consumer and where its workers run."""
    return {
        "fastq_loader's protocol": str(VERSION),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


class SentPayload(Payload):
    """The user's objects as bytes, which are opened once for all workers of a host.

    Args:
        data: a pickle of the parts.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return SentPayload, (self._data,)

    def open(self) -> dict[str, Any]:
        """The parts; the same objects each time.

        Raises:
            Exception: whatever unpickling raises, each time.
        """
        if not hasattr(self, "parts"):
            self.parts = pickle.loads(self._data)
            self._data = b""
        return self.parts


@dataclass(frozen=True)
class HostSpec:
    """What a host is told.

    Attributes:
        plan: the pool's; its payload is a `SentPayload`.
        token: the pool's, see `messages`.
        path: the consumer's `sys.path`. What is not the host's own comes at the end of the host's.
        tls: encrypts connections, or None.
        seeds: of the workers' generators, and of datapipe graphs.
        versions: of what has to be the same where workers run.
    """

    plan: Plan
    token: bytes = field(repr=False)
    path: tuple[str, ...]
    tls: Tls | None
    seeds: tuple[int, int | None]
    versions: dict[str, str]

    @classmethod
    def of(
        cls, plan: Plan, token: bytes, tls: Tls | None = None, seeds: tuple[int, int | None] = (0, None)
    ) -> HostSpec:
        """
        Raises:
            UnpicklableError: the dataset, or one of its functions, cannot be pickled.
        """
        payload = SentPayload(_pickled(plan.payload.open()))
        # A far worker is sent the tasks that its stand-in has claimed; it claims none.
        sent = replace(plan, payload=payload, context=None, dynamic=False, backend=_nowhere)
        return cls(sent, token, tuple(sys.path), tls, seeds, versions())


def _pickled(parts: dict[str, Any]) -> bytes:
    try:
        from cloudpickle import dumps
    except ImportError:  # then the user's objects come from modules
        dumps = pickle.dumps
    try:
        pickled: bytes = dumps(parts)
        return pickled
    except Exception:
        for name, part in parts.items():
            try:
                dumps(part)
            except Exception as error:
                text = f"{name} cannot be sent to another machine: {type(error).__name__}: {error}"
                raise UnpicklableError(text) from error
        raise


def _nowhere(plan: Plan) -> Any:
    raise NotImplementedError("a host starts no pool of its own")
