"""SPDL's threads with its own decoder, which is FFmpeg's, for JPEG files.

As its documentation advises ("Best Practices"): a file becomes a frame that is cropped and flipped by FFmpeg,
and the frames of a batch become one tensor, without a tensor for each. Its channels come last in memory. The
wheel has no FFmpeg in it: it takes the shared libraries of the system.
"""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

import spdl.io
import torch

from bench.peers import LoaderSettings, Unsupported
from bench.peers.spdl_loaders import SpdlThreads
from bench.workloads import Load
from bench.workloads.jpeg import CROP, JpegFolder

NO_FFMPEG = "FFmpeg's shared libraries are not there (Debian: apt-get install ffmpeg)"


class SpdlDecoder(SpdlThreads):
    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        if type(load.dataset) is not JpegFolder:
            raise Unsupported("only JPEG files, as uint8")
        self._files = load.dataset
        super().__init__(load, settings)
        try:
            spdl.io.utils.get_ffmpeg_versions()
        except RuntimeError as error:
            raise Unsupported(NO_FFMPEG) from error

    def _add_stages(self, builder: Any, threads: dict[str, Any]) -> None:
        builder.add_source(chain.from_iterable(self._load.index_batches()))
        builder.pipe(self._decoded, **threads)
        builder.aggregate(self._load.batch_size, drop_last=True).pipe(_batch, **threads)

    def close(self) -> None:
        super().close()
        gc.collect()  # a stopped pipeline is a cycle that holds batches: nanobind reports those left at exit

    def _decoded(self, index: int) -> tuple[Any, int]:
        """The frame of a file, and its label."""
        path, label = self._files.file(index)
        packets: Any = spdl.io.demux_image(path)
        left, top = self._files.corner(packets.codec.width, packets.codec.height)
        flip = "hflip," if self._files.flipped() else ""
        wanted = f"crop={CROP}:{CROP}:{left}:{top},{flip}format=pix_fmts=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=wanted), label


def _batch(samples: list[tuple[Any, int]]) -> list[Any]:
    frames, labels = zip(*samples, strict=True)
    pixels = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
    return [pixels.permute(0, 3, 1, 2), torch.tensor(labels)]
