"""`share`: replaces the large lists, tuples and dicts in a dataset's attributes by columns.

Runs in the program, before it creates a loader.
"""

from __future__ import annotations

import hashlib
import io
import logging
import marshal
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from fastq_loader.system import calls

T = TypeVar("T")

#: Least bytes of a container to share, if the user names none, and items inspected to estimate them.
_LARGE, _SAMPLE = 1 << 20, 200
_KINDS = (list, tuple, dict)
#: Items that are serialized at a time for the digest.
_CHUNK = 10_000

logger = logging.getLogger("fastq_loader")


def share(dataset: T, *attributes: str, name: str | None = None) -> T:
    """Keep a dataset's lists, tuples and dicts of small objects once in memory, for any number of workers.

    A forked worker that reads a Python object writes its reference count, which copies its page; under spawn
    every worker receives a pickled copy. The attributes become read-only sequences and mappings over columns,
    used like the originals: by index, slice and key, in loops, in comparisons. They return plain objects, new
    ones each time. Strings, bytes, numbers, None, and tuples, lists and dicts of these are stored in Arrow's
    layout; other items are pickled one by one. The replaced attributes are logged at INFO.

    >>> dataset = torch.utils.data.TensorDataset(torch.arange(2))
    >>> dataset.names = ["a.png", "b.png"]
    >>> share(dataset, "names").names[1]
    'b.png'

    Args:
        dataset: is modified and returned; the parts of torch's Subset and ConcatDataset are modified, too.
        attributes: names of the containers; without names all containers of 1 MB and more.
        name: processes of this user on this machine that share under the same name use the same memory. The
            first of them creates it; it is freed when the last one ends.

    Raises:
        AttributeError: the dataset has no such attribute.
        TypeError: it is not a list, tuple or dict, or a key has a type that cannot be shared.
        ValueError: other processes share something else under this name.
        RuntimeError: this system has no memory that can be named (Linux has it).
        ImportError: pyarrow is missing. After any of these errors nothing is replaced.
    """
    try:
        from fastq_loader.extras.share import containers
    except ImportError as error:
        raise ImportError(f"share() needs pyarrow ({error}): pip install 'fastq-loader[share]'") from error
    chosen = _chosen(dataset, attributes)
    values = {id(value): value for _, _, value in chosen}  # one object may have several names
    # Datasets in a ConcatDataset have attributes of the same names.
    parts = [id(part) for part in _parts(dataset)]
    names = [f"{parts.index(id(part))}.{key}" for part, key, _ in chosen]

    def make() -> dict[str, Any]:
        made = {of: containers.shared(value, _nbytes(value)) for of, value in values.items()}
        return {each: made[id(value)] for each, (_, _, value) in zip(names, chosen, strict=True)}

    if name is None:
        shared = make()
    else:
        of = {each: _about(value) for each, (_, _, value) in zip(names, chosen, strict=True)}
        shared = _once(name, of, make)
    _put([(part, key, shared[each]) for each, (part, key, _) in zip(names, chosen, strict=True)])
    logger.info("%s", sharing_report(dataset))
    return dataset


def _once(name: str, of: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if lacking := calls.missing(for_workers=False):
        raise RuntimeError(
            f"share(name={name!r}) needs {lacking}, which this system or sandbox lacks; without a name each "
            "process that is not forked has its own copy"
        )
    from fastq_loader.extras.share import named  # not every system can import it

    try:
        return named.once(name, of, make)
    except named.NameInUse as error:
        there = error.about
        keys = [key for key in there.keys() | of.keys() if there.get(key) != of.get(key)]
        names = ", ".join(sorted({key.partition(".")[2] for key in keys}))
        text = f"another process shares something else than {names} under this name; use another one"
        raise ValueError(f"share(name={name!r}): {text}") from None


def _put(chosen: list[tuple[Any, str, Any]]) -> None:
    """Set all attributes, or none if one cannot be set: a dataset may be frozen."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for part, key, value in chosen:
            before.append((part, key, vars(part)[key]))
            setattr(part, key, value)
    except BaseException:
        for part, key, value in before[:-1]:
            setattr(part, key, value)
        raise


def _chosen(dataset: Any, attributes: tuple[str, ...]) -> list[tuple[Any, str, Any]]:
    """The attributes to share: for each its dataset, its name and its value."""
    held = [(part, key, value) for part in _parts(dataset) for key, value in vars(part).items()]
    chosen = [each for each in held if _is_chosen(*each, attributes)]
    if missing := set(attributes) - {key for _, key, _ in chosen} - {key for key, _ in _shared(dataset)}:
        raise AttributeError(
            f"share(): {type(dataset).__name__} has no attribute {min(missing)!r}; it has "
            f"{', '.join(sorted(getattr(dataset, '__dict__', {}))) or 'none'}"
        )
    return chosen


def _is_chosen(part: Any, key: str, value: Any, attributes: tuple[str, ...]) -> bool:
    from fastq_loader.extras.share.containers import Shared

    if isinstance(value, Shared) or (attributes and key not in attributes):
        return False
    refused = _refused(value)
    if refused and attributes:
        raise TypeError(f"share(): {type(part).__name__}.{key} {refused}")
    return not refused and (bool(attributes) or _nbytes(value) >= _LARGE)


def _refused(value: Any) -> str:
    """Why a value cannot be shared; "" if it can."""
    if type(value) not in _KINDS:
        return f"is a {type(value).__name__}; only a list, tuple or dict, of exactly that type, can be shared"
    if type(value) is dict and not all(map(_can_be_key, value)):
        return "has a key that is no string, bytes, number, None or tuple of these, and cannot be shared"
    return ""


def _can_be_key(key: Any) -> bool:
    """Whether a dict with this key can be shared."""
    if type(key) is tuple:
        return all(map(_can_be_key, key))
    return type(key) in (str, bytes, int, float, bool, type(None))


def sharing_report(dataset: Any) -> str:
    """Report the shared attributes of a dataset, one a line, with their bytes before and after.

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
    from fastq_loader.extras.share.containers import Shared

    parts = _parts(dataset)
    return [(key, each) for part in parts for key, each in vars(part).items() if isinstance(each, Shared)]


def _parts(dataset: Any) -> Iterator[Any]:
    """A dataset, and the datasets that it reads from."""
    if hasattr(dataset, "__dict__"):
        yield dataset
        inner = vars(dataset).get("dataset")
        several = vars(dataset).get("datasets")
        for part in ([] if inner is None else [inner]) + (several if isinstance(several, list) else []):
            yield from _parts(part)


def _nbytes(value: Any, depth: int = 0) -> int:
    """Approximate bytes of a container and its contents, estimated from a sample of the items."""
    size = sys.getsizeof(value, 0)
    if type(value) not in _KINDS or not value or depth > 8:
        return size
    some = some_of(value)
    for items in zip(*some, strict=True) if type(value) is dict else [some]:
        # Items may be the same object: the number of such pairs estimates the number of objects.
        counts = Counter(map(id, items))
        pairs = sum(count * (count - 1) for count in counts.values())
        objects = min(len(value), len(some) * (len(some) - 1) / pairs) if pairs else len(value)
        sizes = [_nbytes(item, depth + 1) for item in {id(item): item for item in items}.values()]
        size += int(objects * sum(sizes) / len(sizes))
    return size


def _about(value: Any) -> list[Any]:
    """Description of a container, for comparison in other processes: type, length, a digest of its items."""
    digest, items = hashlib.blake2b(digest_size=16), iter(value.items() if type(value) is dict else value)
    while chunk := list(islice(items, _CHUNK)):
        try:
            data = marshal.dumps(chunk, 2)  # version 2 writes the same bytes for the same values
        except ValueError:  # only pickle can write the items; without references to repeated objects
            pickler = pickle.Pickler(file := io.BytesIO(), 5)
            pickler.fast = True
            pickler.dump(chunk)
            data = file.getvalue()
        digest.update(data)
    return [type(value).__name__, len(value), digest.hexdigest()]


def some_of(value: Any, number: int = _SAMPLE) -> Sequence[Any]:
    """A sample of about `number` items of a list or tuple, or pairs of a dict, evenly spread."""
    step = max(1, len(value) // number)
    return list(islice(value.items(), 0, None, step)) if type(value) is dict else value[::step]
