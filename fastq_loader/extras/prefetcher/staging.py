"""Staging of batches whose loader goes on, and may write to their memory, before they are delivered."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch

from fastq_loader.device.copies import Copy
from fastq_loader.device.staging import SerialStaging
from fastq_loader.packing.tensors import cloned


class AheadStaging(SerialStaging):
    """Copies at once whatever stays on the host and can be copied. Device memory is shared with the stream of
    the copies, so that its next owner writes to it only after the copy, even if the batch is never delivered.
    """

    def begin(self, batch: Any) -> Copy:
        copy, backend = super().begin(batch), self.session.backend
        backend.share(copy.memory, backend.side)
        return copy

    def uncopied(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.copy("K")
        if isinstance(value, torch.Tensor):
            clone = cloned(value)
            if self.session.beside:  # if it is on the device already, the side stream reads it
                self.session.backend.share(clone, self.session.backend.side)
            return clone
        try:
            return deepcopy(value)
        except Exception:  # a lock or an open file
            return value
