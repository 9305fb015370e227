"""Headers: pillow's sizes, the files that a GPU decodes, and the broken ones, which a worker finds."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Replace, Skip
from fastq_loader.extras.images import decoders
from fastq_loader.images import DecodeError, encoded
from tests.support.photographs import KINDS, file_of, photograph

Image = pytest.importorskip("PIL.Image")

PHOTO = file_of(photograph(20, 30), "JPEG")
#: Files that a GPU decodes; others of JPEG are for the CPU's fast decoder, but for the last ones.
BASELINE = ("JPEG", "JPEG, 4:4:4")
FILLED = PHOTO[:2] + b"\xff\xff" + PHOTO[2:]


@pytest.mark.parametrize("name", KINDS)
def test_sizes_are_pillows(name: str) -> None:
    data = KINDS[name]()
    height, width, kind = decoders.read_header(data, name)
    assert (width, height) == Image.open(io.BytesIO(data)).size
    is_jpeg = name.startswith("JPEG") and "CMYK" not in name
    assert kind == (decoders.BASELINE if name in BASELINE else decoders.JPEG if is_jpeg else decoders.OTHER)
    assert encoded(data).header == (height, width, kind)


def test_a_jpeg_may_be_filled_up_or_have_other_colors() -> None:
    assert decoders.read_header(FILLED, "") == (20, 30, decoders.BASELINE)
    in_rgb = file_of(photograph(20, 30), "JPEG", keep_rgb=True)
    assert decoders.read_header(in_rgb, "") == (20, 30, decoders.JPEG)


@given(st.integers(0, len(PHOTO)), st.binary(max_size=40))
def test_any_bytes_are_a_header_or_refused_by_name(cut: int, more: bytes) -> None:
    try:
        assert decoders.read_header(PHOTO[:cut] + more, "holiday.jpg").kind in (
            decoders.BASELINE,
            decoders.JPEG,
        )
    except DecodeError as error:
        assert str(error).startswith("holiday.jpg ")  # noqa: PT017


class Album(Dataset[Any]):
    """Every fifth file is cut off in its header."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return encoded(PHOTO[:30] if index % 5 == 2 else PHOTO, f"photo {index}")


@pytest.mark.filterwarnings("ignore:sample:fastq_loader.BadSampleFound")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_header_is_a_bad_sample(workers: int) -> None:
    with pytest.raises(DecodeError, match="photo 2 cannot be decoded"):
        list(DataLoader(Album(), 4, num_workers=workers))
    skipped = list(DataLoader(Album(), 4, num_workers=workers, errors=Skip(limit=None, only=OSError)))
    names = [name for batch in skipped for name in batch.names]
    assert names == [f"photo {index}" for index in range(20) if index % 5 != 2]
    replaced = DataLoader(Album(), 4, num_workers=workers, errors=Replace(limit=None, only=DecodeError))
    assert [len(batch) for batch in replaced] == [4] * 5
