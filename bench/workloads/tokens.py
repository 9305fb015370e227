"""Token sequences as dicts of numpy arrays, as language models read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 256
LENGTH = 4096
VOCABULARY = 50_257  # GPT-2's


class Sequences(Dataset[dict[str, npt.NDArray[np.int64]]]):
    """`dataset[i]` is {"tokens": int64[4096], "labels": int64[4096]}, the labels one token ahead."""

    def __init__(self) -> None:
        text = np.random.default_rng(0).integers(VOCABULARY, size=(SAMPLES, LENGTH + 1), dtype=np.int64)
        self.tokens, self.labels = text[:, :-1].copy(), text[:, 1:].copy()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:
        which = index % SAMPLES
        return {"tokens": self.tokens[which], "labels": self.labels[which]}


class Tokens(Workload):
    name = "tokens"
    description = "8 dicts of 4096 tokens and 4096 labels, int64 numpy arrays"
    transport_bound = True

    def build(self, folder: Path) -> Load:
        return Load(Sequences(), batch_size=8)
