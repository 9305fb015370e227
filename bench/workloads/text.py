"""Text: token sequences of one length, sequences of different lengths, and annotations without any tensor.

`ragged` is padded by a collate of the user's, so that no two batches have one shape; lengths are
log-normal, as those of documents are. `objects` can only be pickled: it shows what a loader adds to that.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bench.workloads import Cycled, Endless, Load, Workload

SEQUENCES, DOCUMENTS, ANNOTATIONS = 256, 4096, 1024
LENGTH = 4096
VOCABULARY = 50_257  # GPT-2's
MEDIAN, SIGMA = 128, 0.7  # tokens of a document; a tenth of them is longer than 314
SHORTEST, LONGEST = 8, 1024
MOST_BOXES = 12
WORDS = (
    "a the two small large red blue old man woman dog horse bus tree street table on under near with".split()  # noqa: SIM905
)
CATEGORIES = ("person", "dog", "horse", "bus", "tree", "table")


class Sequences(Endless):
    """`dataset[i]` is {"tokens": int64[4096], "labels": int64[4096]}, the labels one token ahead."""

    def __init__(self) -> None:
        text = np.random.default_rng(0).integers(VOCABULARY, size=(SEQUENCES, LENGTH + 1), dtype=np.int64)
        self.tokens, self.labels = text[:, :-1].copy(), text[:, 1:].copy()

    def __getitem__(self, index: int) -> dict[str, Any]:
        which = index % SEQUENCES
        return {"tokens": self.tokens[which], "labels": self.labels[which]}


TOKENS = Workload(
    "tokens",
    "8 dicts of 4096 tokens and 4096 labels, int64 numpy arrays",
    lambda folder: Load(Sequences(), batch_size=8),
)


class Documents(Endless):
    """`dataset[i]` is (int64[8 to 1024], int): the tokens of a document and its class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(DOCUMENTS).normal_(0, SIGMA, generator=generator).exp_().mul_(MEDIAN)
        ends = lengths.long().clamp_(SHORTEST, LONGEST).cumsum(0).tolist()
        # One tensor and where its documents end: pickling 4096 views of it would write all of it 4096 times.
        self.text = torch.randint(VOCABULARY, (ends[-1],), generator=generator)
        self.bounds = list(pairwise([0, *ends]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % DOCUMENTS
        start, end = self.bounds[which]
        return self.text[start:end], which % 4


def pad(samples: list[tuple[Tensor, int]]) -> dict[str, Any]:
    """Collate to {"tokens": int64[B, longest], "lengths": int64[B], "labels": int64[B]}, padded with 0."""
    documents, labels = zip(*samples, strict=True)
    return {
        "tokens": pad_sequence(list(documents), batch_first=True),
        "lengths": torch.tensor([len(document) for document in documents]),
        "labels": torch.tensor(labels),
    }


RAGGED = Workload(
    "ragged",
    "32 token sequences of 8 to 1024, padded to the longest by a collate of the user's",
    lambda folder: Load(Documents(), batch_size=32, collate_fn=pad),
)


def _annotation(source: random.Random, number: int) -> dict[str, Any]:
    """That of one image, as COCO's are; fields that nobody filled in are None."""
    return {
        "id": f"image_{number:012d}",
        "caption": " ".join(source.choices(WORDS, k=source.randint(6, 20))),
        "boxes": [_box(source) for _ in range(source.randint(0, MOST_BOXES))],
        "extras": {
            "size": {"width": source.randint(300, 640), "height": source.randint(300, 640)},
            "photographer": source.choice(("Ada", "Ben", None)),
            "licence": None,
        },
    }


def _box(source: random.Random) -> dict[str, Any]:
    return {
        "xywh": [round(source.uniform(0, 300), 2) for _ in range(4)],
        "category": source.choice(CATEGORIES),
        "score": source.choice((None, round(source.random(), 3))),
    }


def columns(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Collate to a dict of lists: torch's own rules refuse None and lists of different lengths."""
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _annotations(folder: Path) -> Load:
    source = random.Random(0)
    samples = [_annotation(source, number) for number in range(ANNOTATIONS)]
    return Load(Cycled(samples), batch_size=32, collate_fn=columns)


OBJECTS = Workload(
    "objects",
    "32 annotations: strings, lists of boxes, nested dicts with None; a collate of the user's",
    _annotations,
)
