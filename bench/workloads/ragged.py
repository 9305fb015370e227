"""Sequences of different lengths and a collate of the user's that pads them: no two batches have one shape.

Lengths are log-normal, as those of sentences and documents are.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 4096
VOCABULARY = 50_257  # GPT-2's
CLASSES = 4
MEDIAN, SIGMA = 128, 0.7  # tokens; a tenth of the sequences is longer than 314
SHORTEST, LONGEST = 8, 1024


class Documents(Dataset[tuple[Tensor, int]]):
    """`dataset[i]` is (int64[8 to 1024], int): the tokens of a document and its class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(SAMPLES).normal_(0, SIGMA, generator=generator).exp_().mul_(MEDIAN)
        ends = lengths.long().clamp_(SHORTEST, LONGEST).cumsum(0).tolist()
        # One tensor and where its documents end: pickling 4096 views of it would write all of it 4096 times.
        self.text = torch.randint(VOCABULARY, (ends[-1],), generator=generator)
        self.bounds = list(pairwise([0, *ends]))

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % SAMPLES
        start, end = self.bounds[which]
        return self.text[start:end], which % CLASSES


def pad(samples: list[tuple[Tensor, int]]) -> dict[str, Any]:
    """Collate to {"tokens": int64[B, longest], "lengths": int64[B], "labels": int64[B]}, padded with 0."""
    documents, labels = zip(*samples, strict=True)
    return {
        "tokens": pad_sequence(list(documents), batch_first=True),
        "lengths": torch.tensor([len(document) for document in documents]),
        "labels": torch.tensor(labels),
    }


class Ragged(Workload):
    name = "ragged"
    description = "32 token sequences of 8 to 1024, padded to the longest by a collate of the user's"

    def build(self, folder: Path) -> Load:
        return Load(Documents(), batch_size=32, collate_fn=pad)
