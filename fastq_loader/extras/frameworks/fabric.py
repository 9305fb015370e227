"""Make Fabric's wrapper forward our loader's methods: `import fastq_loader.integrations.fabric`.

Runs in the consumer. Fabric keeps our loader, in a wrapper that copies its attributes but not its methods.
Once this module is imported, the wrapper forwards `state_dict`, `statistics`, `close` and others.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from fastq_loader.loader import DataLoader


def _reach(self: Any, name: str) -> Any:
    loader = vars(self).get("_dataloader")
    if not isinstance(loader, DataLoader) or name.startswith("__"):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    return getattr(loader, name)


#: `lightning` and `lightning_fabric` each have a wrapper class.
_PACKAGES = [name for name in ("lightning_fabric", "lightning.fabric") if name in sys.modules]

for _package in _PACKAGES or ["lightning.fabric"]:
    _wrapper = getattr(importlib.import_module(f"{_package}.wrappers"), "_FabricDataLoader", None)
    if _wrapper is None:
        raise ImportError(
            f"fastq_loader supports Lightning 2.5 and 2.6; this {_package} wraps loaders otherwise: iterate "
            "the loader itself, and divide the data with a DistributedSampler"
        )
    _wrapper.__getattr__ = _reach
