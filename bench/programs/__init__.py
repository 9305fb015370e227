"""Five complete programs, to be copied and changed, and what runs them beside torch's loader.

`files_by_id`, `image_table`, `photographs`, `prefetch` and `csv_table` import nothing from the bench. `data`
writes what they read, `run` runs one of them in a fresh process, `track` says what that costs, `limits` takes
memory away from it, `case` has loaders take turns, `command` is the command line, and `report` has the
tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

LOADERS = MappingProxyType(
    {"torch": "torch.utils.data:DataLoader", "fastq_loader": "fastq_loader:DataLoader"}
)
CACHED, ON_DISK = "cached", "cached_on_disk"
LABELS = {
    CACHED: "fastq_loader, cached",
    ON_DISK: "fastq_loader, cached, path=",
    "in_workers": "fastq_loader, in workers",
    "prefetcher": "torch, our Prefetcher",
    "torchvision": "torch, with torchvision",
}
"""Of loaders whose names do not say it."""


_TORCHVISION = (
    {"torchvision": "bench.programs.photographs:with_torchvision"} if find_spec("torchvision") else {}
)


class Program(NamedTuple):
    """How a program is run.

    Attributes:
        data: the function of `data` that writes its files. `few`: its arguments where few files will do.
        workers: the numbers of workers that it is run with.
        turns: how often a round runs it: more than once where a run takes a fraction of a second.
        loaders: name in rows and on the command line → where to find the second argument of its `train`.
        on_device: whether it shows what a device does, and has no row in the README without one.
        apart: loaders whose random numbers, so losses, are other ones than those of the rest.
        part: for a program that runs with little memory, the function of `data` that makes a folder of a few
            of its rows: what it needs without the others is measured.
    """

    about: str
    data: str
    few: Mapping[str, Any]
    workers: Sequence[int] = (2,)
    epochs: int = 3
    turns: int = 1
    loaders: Mapping[str, str] = LOADERS
    on_device: bool = False
    apart: Sequence[str] = ()
    part: str = ""


PROGRAMS = {
    "files_by_id": Program(
        "a tensor file for each ID, training and validation",
        "tensor_files",
        {"training": 256, "side": 8},
        loaders={**LOADERS, CACHED: "bench.programs.files_by_id:with_cached"},
    ),
    "image_table": Program(
        "800 MB of JPEGs, of which memory has room for 100",
        "jpeg_table",
        {"nbytes": 200_000, "width": 160},
        loaders={**LOADERS, **dict.fromkeys((CACHED, ON_DISK), "bench.programs.image_table:with_cached")},
        part="part_of_table",
    ),
    "photographs": Program(
        "JPEGs of 500x375, cropped and flipped by DecodeImages (torch: by pillow)",
        "photographs",
        {"nbytes": 500_000, "width": 120},
        loaders={
            "torch": "bench.programs.photographs:with_pillow",
            **_TORCHVISION,
            "fastq_loader": "bench.programs.photographs:on_device",
            "in_workers": "bench.programs.photographs:in_workers",
        },
        apart=("torch", "torchvision"),
    ),
    "prefetch": Program(
        "images normalised on the device, beside the step",
        "pixel_arrays",
        {"images": 256, "side": 32},
        loaders={
            "torch": "bench.programs.prefetch:HandWritten",
            "fastq_loader": "bench.programs.prefetch:on_device",
            "prefetcher": "bench.programs.prefetch:with_prefetcher",
        },
        on_device=True,
    ),
    "csv_table": Program(
        *("a small table and a small model", "small_table", {"rows": 200}),
        workers=(0, 2),
        epochs=10,
        turns=3,
    ),
}
