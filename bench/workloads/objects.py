"""Strings and Python objects, as captioning and detection read their annotations: no tensor in the batch.

Such batches can only be pickled, so the workload shows what a loader adds to that.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 1024
MOST_BOXES = 12
WORDS = [
    "a",
    "the",
    "two",
    "small",
    "large",
    "red",
    "blue",
    "old",
    "man",
    "woman",
    "dog",
    "horse",
    "bus",
    "tree",
    "street",
    "table",
    "on",
    "under",
    "near",
    "with",
]
CATEGORIES = ("person", "dog", "horse", "bus", "tree", "table")
SEED = 0


class Annotations(Dataset[dict[str, Any]]):
    """`dataset[i]` is the annotation of one image, as COCO's are: id, caption, boxes, and a dict of extras.

    "boxes" is a list of 0 to 12 dicts with four floats, a name and an optional score; fields that nobody
    filled in are None.
    """

    def __init__(self) -> None:
        source = random.Random(SEED)
        self.annotations = [_annotation(source, number) for number in range(SAMPLES)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.annotations[index % SAMPLES]


def _annotation(source: random.Random, number: int) -> dict[str, Any]:
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


class Objects(Workload):
    name = "objects"
    description = "32 annotations: strings, lists of boxes, nested dicts with None; a collate of the user's"
    transport_bound = True

    def build(self, folder: Path) -> Load:
        return Load(Annotations(), batch_size=32, collate_fn=columns)
