"""Standard streams that are missing, as in daemons and programs without a console.

Runs in the consumer. Where the descriptors 0 to 2 are free, whatever is opened next gets their numbers. If
that is the shared memory, a C library that writes to standard output writes into a batch.
"""

from __future__ import annotations

import os


def occupy() -> None:
    """Put /dev/null where one of the descriptors 0 to 2 is free: for good, and for the children too."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > descriptor:  # another thread was faster
                os.close(opened)
            else:
                os.set_inheritable(opened, True)
