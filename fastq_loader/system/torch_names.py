"""The private names of torch that this package uses, found and checked when this module is imported.

Runs in every process that has imported torch. A release of torch that has moved or removed a name is reported
here, by the name, and not in the middle of an epoch. Other modules import these names from here only.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.utils.data

Kind = TypeVar("Kind", bound=type)


def _find(*paths: str) -> Any:
    """The object behind the first of these names that torch has: releases have different ones.

    Raises:
        ImportError: torch has none of them.
    """
    for path in paths:
        found: Any = torch
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    raise ImportError(
        f"torch {torch.__version__} has no torch.{paths[-1]}, which fastq_loader uses: install another "
        "release of torch, or a newer fastq_loader"
    )


#: The module with torch's functions that collate, and their table.
collate = _find("utils.data._utils.collate")
#: The module with `_worker_info`, what `get_worker_info()` returns.
worker = _find("utils.data._utils.worker")
#: Shards a graph of datapipes in a worker.
sharding_worker_init_fn = _find("utils.data.dataloader._sharding_worker_init_fn")
#: Copies a batch of any type into page-locked memory.
pin_memory = _find("utils.data._utils.pin_memory.pin_memory")
#: The path of torch's extension module.
extension = _find("_C.__file__")
#: Copies a list of tensors into another one.
foreach_copy_ = _find("_foreach_copy_")
#: The visible devices of CUDA, from the environment, without its runtime.
parse_visible_devices = _find("cuda._parse_visible_devices")
#: The number of modes that change what functions of torch do.
is_under_mode = _find("_C._len_torch_function_stack")
#: Whether an operator has a kernel for the devices of a kind.
dispatch_key_for_device = _find("_C._dispatch_key_for_device")
has_kernel_for_dispatch_key = _find("_C._dispatch_has_kernel_for_dispatch_key")

_sparse = _find("_utils._get_sparse_tensors_to_validate", "_utils._sparse_tensors_to_validate")


def sparse_tensors_to_validate() -> list[Any]:
    """The sparse tensors that were unpickled, and that torch keeps until the next torch.load. In torch 2.15
    there is a list for each thread."""
    found: list[Any] = _sparse() if callable(_sparse) else _sparse
    return found


def untraced(kind: Kind) -> Kind:
    """Class decorator: torch.compile leaves the methods alone, and what they call, as it does with torch's
    own loader. `torch.compiler.disable` would import the compiler, and add a call to each."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(frames, "_FrameAction", None)  # of newer releases
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            vars(method)["_torchdynamo_disable"] = True  # not part of a user's graph
            if action is not None:  # nor compiled by itself
                strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP)
                frames.set_code_exec_strategy(method.__code__, strategy)
    return kind
