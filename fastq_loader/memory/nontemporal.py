"""Copies with non-temporal stores, which bypass the caches.

Runs in workers. Where the blocks in use exceed a cache, data written to a block has left the cache before
anybody reads it. Until then it has displaced more useful data: the next samples, and the code and objects of
the consumer and the workers. Non-temporal stores write whole cache lines straight to memory, and the
processor does not read each line first. With two workers on two cores with 32 MiB of cache, batches of 10 MB
are delivered 1.1 times as fast as without these stores, and batches of 32 MB 1.5 times; 1.2 and 1.3 times
where the consumer reads every byte afterwards. Batches of up to 2 MB would be up to a tenth slower: the
consumer finds those in its cache.

No package that is used here can copy many pieces like that. So the copy is written in C (`_nontemporal.c`),
and built when the package is installed if there is a C compiler and an x86-64 processor. Otherwise
`AVAILABLE` is False, and batches are written as in torch.
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
        """Copy the same bytes through the caches."""
        for at, source in enumerate(sources):
            ctypes.memmove(target + at * nbytes, source, nbytes)
else:
    AVAILABLE = True

#: Bytes of all blocks together up to which they are still found in a cache; irrelevant without such stores. A
#: cache shared by a few cores is of this order, and virtual machines do not report theirs reliably (one
#: reported 32 MiB one time and 320 MiB another).
CACHED = 32 << 20 if AVAILABLE else math.inf
#: Pieces below this many bytes are written as usual: checking a sample takes as long as copying 8 KiB.
SMALLEST_PIECE = 32 << 10


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])
