"""The limit of a cache as a number of bytes. Runs in the program."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from fastq_loader.extras.insight.machine import local_ranks, memory_bytes

_NUMBER_AND_UNIT = re.compile(r"(\d+\.?\d*|\.\d+) *(B|[KMGT]I?B|)", re.IGNORECASE)


def is_part(limit: int | str) -> bool:
    """Whether a limit is a part of the free space, and no number of bytes."""
    return isinstance(limit, str) and "." in limit and limit.strip()[-1:] in "0123456789."


def bytes_of(limit: Any, path: str | None, is_shared: bool) -> int:
    """A limit as a number of bytes.

    Args:
        limit: as users write it.
        path: of the cache, for the free space of its disk; None: of the memory.
        is_shared: whether the ranks of this machine share the cache; else each has its part.

    Raises:
        TypeError, ValueError: it is malformed.
    """
    wrong = f"cached: limit={limit!r} must be bytes (8_000_000_000, '8GB') or a part of free space ('0.5')"
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise TypeError(wrong)
    found = _NUMBER_AND_UNIT.fullmatch(str(limit).strip())
    if found is None:
        raise ValueError(wrong)
    number, unit = found.groups()
    count = float(number) * (1024 if len(unit) == 3 else 1000) ** "BKMGT".index(unit[:1].upper() or "B")
    if is_part(limit):
        if not 0 < count < 1:
            raise ValueError(wrong)
        free = memory_bytes() if path is None else shutil.disk_usage(_there(path)).free
        count *= free / (1 if is_shared else local_ranks())
    if not 0 < count < 1 << 62:
        raise ValueError(wrong)
    return int(count)


def _there(path: str) -> str:
    """The folder that the values lie in, or will lie in: through links and mounts."""
    path = os.path.realpath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path
