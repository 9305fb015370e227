"""Put our class in place of torch's, for libraries that create loaders; and check which class runs.

Runs in the consumer. Owns the record of the replaced module attributes. Existing instances, and classes that
were derived from torch's before, are left as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.utils.data

from fastq_loader.loader import DataLoader

#: The name of a module, and of one of its attributes.
ModuleAttribute = tuple[str, str]

TORCHS: type[Any] = torch.utils.data.DataLoader
#: Module attributes that were torch's class; empty if not installed.
_replaced: set[ModuleAttribute] = set()

#: Attributes in which wrappers and trainers keep the loader that they iterate.
_KEEPERS = (
    *("base_dataloader", "_dataloader", "_loader", "loader", "dataloader"),
    *("iterables", "train_dataloader", "callback_handler", "get_train_dataloader", "train_loader"),
)
_ACCELERATE = "import fastq_loader.integrations.accelerate before the loader is prepared"
_REMEDIES = {
    "accelerate": _ACCELERATE,
    "transformers": f"{_ACCELERATE}, and call fastq_loader.install() before the Trainer makes it, or return "
    "a fastq_loader.DataLoader from get_train_dataloader()",
    "ray": "make it with sampler=DistributedSampler(dataset), which Ray Train does not replace",
}
_REMEDY = "make it with fastq_loader.DataLoader, or call fastq_loader.install() before it is made"


def attributes_of(value: object) -> set[ModuleAttribute]:
    """All module attributes that are this object, except in our own modules."""
    return {
        (key, name)
        for key, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and key.partition(".")[0] != "fastq_loader"
        # Past its `__getattribute__`: a module that loads lazily is not loaded by this.
        for name, each in list(object.__getattribute__(module, "__dict__").items())
        if each is value
    }


def put(value: object, attributes: set[ModuleAttribute]) -> None:
    """Set these module attributes to an object."""
    for key, name in attributes:
        setattr(sys.modules[key], name, value)


def install() -> None:
    """Put our `DataLoader` in place of torch's, in this process.

    `torch.utils.data.DataLoader` is then our class, also in every module that has imported it. Call this
    before importing a library that derives a class from it (PyG, MONAI, timm, litdata), and before any loader
    is created: `isinstance(loader, torch.utils.data.DataLoader)` checks for our class from then on. A second
    call only replaces torch's class in modules that were imported since.

    Accelerate rebuilds all loaders, also ours, from torch's arguments alone. If yours have further arguments,
    such as a schedule or workers, import `fastq_loader.integrations.accelerate`, too.

    >>> install()
    >>> torch.utils.data.DataLoader is DataLoader
    True
    >>> uninstall()
    """
    attributes = attributes_of(TORCHS)
    put(DataLoader, attributes)
    _replaced.update(attributes)


def uninstall() -> None:
    """Put torch's class back wherever `install()` found it.

    Loaders that were created meanwhile stay ours, and so do classes that were derived, and modules that were
    imported meanwhile. Without `install()` it does nothing.

    >>> install()
    >>> uninstall()
    >>> torch.utils.data.DataLoader is DataLoader
    False
    """
    ours = attributes_of(DataLoader)
    put(TORCHS, _replaced & ours)
    _replaced.clear()


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for the duration of a `with` block. Inside another one, or after `install()`, it changes
    nothing.

    >>> with installed():
    ...     loader = torch.utils.data.DataLoader(range(8))
    >>> isinstance(loader, DataLoader)
    True
    """
    outermost = not _replaced
    install()
    try:
        yield
    finally:
        if outermost:
            uninstall()


def assert_active(loader_or_trainer: Any) -> None:
    """Check that the loader that runs is ours, and that no framework put one of torch's class in its place.

    Args:
        loader_or_trainer: a loader, also one that Accelerate or Fabric has wrapped, or a `Prefetcher`; the
            Trainer of Lightning, once `fit` has begun, or of transformers; any object, list or dict that
            contains loaders.

    Raises:
        AssertionError: another class runs; the text names the class, and the remedy.
        TypeError: no loader was found.

    >>> assert_active(DataLoader(range(8)))
    >>> assert_active({"train": torch.utils.data.DataLoader(range(8))})
    Traceback (most recent call last):
    AssertionError: torch.utils.data.dataloader.DataLoader runs...: make it with fastq_loader.DataLoader, ...
    """
    found = list(_running(loader_or_trainer, ()))
    if not found:
        raise TypeError(
            f"no loader was found in {_name(loader_or_trainer)}: give assert_active() the loader itself, or "
            "call it when the training has begun"
        )
    for loader, keepers in found:
        if not issubclass(type(loader), DataLoader):
            kept = "".join(f", in {_name(keeper)}" for keeper in keepers)
            roots = [type(keeper).__module__.partition(".")[0] for keeper in keepers]
            remedy = next((_REMEDIES[root] for root in roots if root in _REMEDIES), _REMEDY)
            raise AssertionError(f"{_name(loader)} runs{kept}, and not fastq_loader.DataLoader: {remedy}")


def _running(of: Any, keepers: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The loaders that would be iterated, each with the objects that contain it, the outermost first."""
    if isinstance(of, (list, tuple, Mapping)):
        for each in of.values() if isinstance(of, Mapping) else of:
            yield from _running(each, keepers)
        return
    if not issubclass(type(of), DataLoader) and len(keepers) < 4:
        for name in _KEEPERS:
            kept = getattr(of, name, None)
            if name.endswith("train_dataloader") and callable(kept):
                kept = kept()
            if kept is not None and (found := list(_running(kept, (*keepers, of)))):
                yield from found
                return
    if issubclass(type(of), TORCHS):  # not isinstance: Accelerate's wrappers claim the loader's class
        yield of, keepers


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
