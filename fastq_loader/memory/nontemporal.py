"""Copies with non-temporal stores, which bypass the caches.

Runs in workers. Where the blocks in use are more than a cache holds, what is written to one has left the
cache before anybody reads it. On its way it has pushed out what is of use: the next samples, and the code and
objects of the consumer and the workers. Non-temporal stores write whole cache lines straight to memory, and
the processor does not read each line first. Two workers on two cores with 32 MiB of cache deliver batches of
10 MB 1.1 times as fast so, and of 32 MB 1.5 times, beside the same loader without them; 1.2 and 1.3 times
where the consumer reads every byte afterwards. Batches of up to 2 MB would come up to a tenth slower: the
consumer finds those in its cache.

No package that is used here has such a copy of many pieces. So it is some lines of C (`_nontemporal.c`),
built when the package is installed if there is a C compiler and an x86-64 processor. Anywhere else
`AVAILABLE` is False, and batches are written as torch writes them.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

try:
    from fastq_loader.memory._nontemporal import copy as copy
except ImportError:
    AVAILABLE = False

    def copy(target: int, sources: list[int], nbytes: int, /) -> None:
        """The same bytes, through the caches."""
        for at, source in enumerate(sources):
            ctypes.memmove(target + at * nbytes, source, nbytes)
else:
    AVAILABLE = True

#: Bytes that all blocks together may have and still be found in a cache; without such stores it does not
#: matter. What a few cores share is of this order, and virtual machines do not tell what they have (one said
#: 32 MiB one time and 320 MiB another).
CACHED = 32 << 20 if AVAILABLE else math.inf
#: Pieces below this many bytes are written as ever: checking a sample takes as long as copying 8 KiB.
SMALLEST_PIECE = 32 << 10


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])
