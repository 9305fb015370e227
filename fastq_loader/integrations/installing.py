"""Our class in the place of torch's, for libraries that make loaders; and which class it is that runs.

Runs in the consumer. Owns what was replaced in which module. Instances are left as they are, and so are
classes that others derived from torch's before.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.utils.data

from fastq_loader.loader import DataLoader

#: The name of a module, and of one of its attributes.
Place = tuple[str, str]

TORCHS: type[Any] = torch.utils.data.DataLoader
#: Places that referred to torch's class, and those that referred to ours before; None: nothing is installed.
_replaced: set[Place] = set()
_ours_before: set[Place] | None = None

#: Where wrappers and trainers keep the loader that they iterate.
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


def places_of(value: object) -> set[Place]:
    """Every attribute of a module that is this object; of our own modules none."""
    return {
        (key, name)
        for key, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and key.partition(".")[0] != "fastq_loader"
        # A module that loads itself when it is first used stays as it is.
        for name, each in list(object.__getattribute__(module, "__dict__").items())
        if each is value
    }


def put(value: object, places: set[Place]) -> None:
    for key, name in places:
        setattr(sys.modules[key], name, value)


def install() -> None:
    """Put our `DataLoader` in the place of torch's, for this process.

    Whoever asks `torch.utils.data` for it gets ours, and so does every module that has imported it. Call it
    before a library that derives from it (PyG, MONAI, timm, litdata) is imported, and before any loader is
    made: `isinstance(loader, torch.utils.data.DataLoader)` means ours from then on. Calling it again does
    nothing but look at the modules once more.

    Accelerate builds loaders anew with torch's arguments only, also those of ours. Where they have a schedule
    or workers of their own, import `fastq_loader.integrations.accelerate`, too.

    >>> install()
    >>> torch.utils.data.DataLoader is DataLoader
    True
    >>> uninstall()
    """
    global _ours_before
    if _ours_before is None:
        _ours_before = places_of(DataLoader)
    places = places_of(TORCHS)
    put(DataLoader, places)
    _replaced.update(places)


def uninstall() -> None:
    """Put torch's class back: where it was, and in modules that have imported it from torch since.

    Loaders that were made meanwhile stay ours, and so do classes that were derived. Without `install()` it
    does nothing.

    >>> install()
    >>> uninstall()
    >>> torch.utils.data.DataLoader is DataLoader
    False
    """
    global _ours_before
    if _ours_before is None:
        return
    since = places_of(DataLoader) - _ours_before
    put(TORCHS, {place for place in since if place in _replaced or _is_torchs(*place)})
    _replaced.clear()
    _ours_before = None


def _is_torchs(name: str, attribute: str) -> bool:
    """Whether a module that was imported meanwhile has the class by an import from torch."""
    try:
        source = inspect.getsource(sys.modules[name])
        nodes = list(ast.walk(ast.parse(source)))
    except (OSError, TypeError, SyntaxError):  # there is none: a program that was typed
        return name == "__main__"
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    of = [each.module for each in imports for to in each.names if (to.asname or to.name) == attribute]
    if of:
        return str(of[-1]).partition(".")[0] == "torch"
    return "torch" in source and "fastq_loader" not in source


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for as long as a `with` lasts. Inside another one, or after `install()`, it changes
    nothing.

    >>> with installed():
    ...     loader = torch.utils.data.DataLoader(range(8))
    >>> isinstance(loader, DataLoader)
    True
    """
    outermost = _ours_before is None
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
            keeps loaders.

    Raises:
        AssertionError: another class runs; it names the class, and the line that mends it.
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
    """Loaders that would be iterated, each with what keeps it, the outermost first."""
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
