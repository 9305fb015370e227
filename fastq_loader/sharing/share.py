"""`share`: a dataset's large lists, tuples and dicts become columns, in its own attributes.

Runs in the program, before it makes a loader.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

#: Bytes from which on a container is worth it, where the user names none, and items that are looked at.
_LARGE, _SAMPLE = 1 << 20, 200
#: Bytes of a number, or of where a string ends.
_OFFSET = 8
_KINDS = (list, tuple, dict)

logger = logging.getLogger("fastq_loader")


def share(dataset: T, *attributes: str, name: str | None = None) -> T:
    """Keep a dataset's lists, tuples and dicts of small objects once in memory, for any number of workers.

    A forked worker that reads a Python object writes its reference count, which copies its page; under spawn
    every worker gets all of it pickled. The attributes become sequences and mappings over columns that are
    read like what they replace: by index, slice and key, in loops, in comparisons. They give plain objects,
    new ones each time, and cannot be changed. Strings, bytes, numbers, None, and tuples, lists and dicts of
    these lie in Arrow's layout; other items are pickled one by one. What was replaced is logged at INFO.

    >>> dataset = torch.utils.data.TensorDataset(torch.arange(2))
    >>> dataset.names = ["a.png", "b.png"]
    >>> share(dataset, "names").names[1]
    'b.png'

    Args:
        dataset: is changed, and returned; so are the parts of torch's Subset and ConcatDataset.
        attributes: names of the containers; none: those of 1 MB and more.
        name: processes of this user on this machine that share under the same name have one memory. The
            first of them makes it; it ends with the last.

    Raises:
        AttributeError: the dataset has no such attribute.
        TypeError: it is no list, tuple or dict, or a key is of a type that cannot be shared.
        ValueError: what others share under this name has another length.
        ImportError: pyarrow is missing. Whatever is raised, nothing was replaced.
    """
    try:
        from fastq_loader.sharing import containers, named
    except ImportError as error:
        raise ImportError(f"share() needs pyarrow ({error}): pip install '.[share]' in a clone") from error
    chosen = _chosen(dataset, attributes)
    values = {id(value): value for _, _, value in chosen}  # one object may have several names

    def make() -> dict[str, Any]:
        made = {of: containers.shared(value, _nbytes(value)) for of, value in values.items()}
        return {str(number): made[id(value)] for number, (_, _, value) in enumerate(chosen)}

    shared = make() if name is None else named.once(name, make)
    # By number: datasets in a ConcatDataset have attributes of the same names.
    found = [shared.get(str(number), ()) for number in range(len(chosen))]
    for (_, key, value), there in zip(chosen, found, strict=True):
        if len(there) != len(value):
            raise ValueError(
                f"share(name={name!r}): another process shares {key!r} with {len(there):,} "
                f"items under this name, and here it has {len(value):,}; use another name"
            )
    for (part, key, _), there in zip(chosen, found, strict=True):
        setattr(part, key, there)
    logger.info("%s", sharing_report(dataset))
    return dataset


def _chosen(dataset: Any, attributes: tuple[str, ...]) -> list[tuple[Any, str, Any]]:
    """Datasets, the names of their attributes that are to be shared, and these."""
    from fastq_loader.sharing.containers import Shared

    chosen, done = [], {key for key, _ in _shared(dataset)}
    for part in _parts(dataset):
        for key, value in vars(part).items():
            if isinstance(value, Shared) or (attributes and key not in attributes):
                continue
            refused = _refused(value)
            if refused and attributes:
                raise TypeError(f"share(): {type(part).__name__}.{key} {refused}")
            if not refused and (attributes or _nbytes(value) >= _LARGE):
                chosen.append((part, key, value))
    if missing := set(attributes) - {key for _, key, _ in chosen} - done:
        raise AttributeError(
            f"share(): {type(dataset).__name__} has no attribute {min(missing)!r}; it has "
            f"{', '.join(sorted(vars(dataset))) or 'none'}"
        )
    return chosen


def _refused(value: Any) -> str:
    """Why a value cannot be shared; "" if it can."""
    from fastq_loader.sharing.containers import can_be_key

    if type(value) not in _KINDS:
        return f"is a {type(value).__name__}; only a list, tuple or dict, of exactly that type, can be shared"
    if type(value) is dict and not all(map(can_be_key, value)):
        return "has a key that is no string, bytes, number, None or tuple of these, and cannot be shared"
    return ""


def sharing_report(dataset: Any) -> str:
    """What of a dataset is shared, a line for each attribute, and the bytes before and after.

    >>> dataset = torch.utils.data.TensorDataset(torch.arange(2))
    >>> dataset.names = ["a.png", "b.png"]
    >>> sharing_report(share(dataset, "names"))
    'names: list of 2 items, about 0.0 MB in each process before, 0.0 MB once now'
    """
    lines = [
        f"{key}: {each.kind.__name__} of {len(each):,} items, about {each.before / 1e6:,.1f} MB in each "
        f"process before, {each.nbytes / 1e6:,.1f} MB once now"
        for key, each in _shared(dataset)
    ]
    return "\n".join(lines) or "nothing is shared: there is no list, tuple or dict of 1 MB or more"


def _shared(dataset: Any) -> list[tuple[str, Any]]:
    from fastq_loader.sharing.containers import Shared

    parts = _parts(dataset)
    return [(key, each) for part in parts for key, each in vars(part).items() if isinstance(each, Shared)]


def _parts(dataset: Any) -> Iterator[Any]:
    """A dataset, and those that it reads from."""
    if hasattr(dataset, "__dict__"):
        yield dataset
        inner = vars(dataset).get("dataset")
        several = vars(dataset).get("datasets")
        for part in ([] if inner is None else [inner]) + (several if isinstance(several, list) else []):
            yield from _parts(part)


def _nbytes(value: Any, depth: int = 0) -> int:
    """Bytes of a container with all that is in it, about: some items stand for the others."""
    size = sys.getsizeof(value, 0)
    if type(value) not in _KINDS or not value or depth > 8:
        return size
    some = some_of(value)
    items = (each for pair in some for each in pair) if type(value) is dict else iter(some)
    return size + sum(_nbytes(item, depth + 1) for item in items) * len(value) // len(some)


def some_of(value: Any, number: int = _SAMPLE) -> Sequence[Any]:
    """Items of a list or tuple, or pairs of a dict, that stand for all: evenly spread, about so many."""
    step = max(1, len(value) // number)
    return list(islice(value.items(), 0, None, step)) if type(value) is dict else value[::step]


def containers_of(dataset: Any) -> Iterator[tuple[str, Any, int]]:
    """The attributes of a dataset that `share` would replace: their names, values, and bytes, about."""
    for part in _parts(dataset):
        for name, value in list(vars(part).items()):
            if type(value) in _KINDS and (nbytes := _nbytes(value)) >= _LARGE:
                yield name, value, nbytes


def columns_nbytes(value: Any) -> int:
    """Bytes that a container takes once it is shared, about: some items stand for the others."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass")) + _OFFSET
    if isinstance(value, bytes):
        return len(value) + _OFFSET
    if type(value) not in _KINDS or not value:
        return _OFFSET
    some = some_of(value)
    return sum(map(columns_nbytes, some)) * len(value) // len(some)
