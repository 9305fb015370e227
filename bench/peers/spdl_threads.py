"""SPDL's thread pipeline: batches are fetched and collated on threads of the consumer's own process.

The way that SPDL's documentation recommends where the work lets go of the GIL. Index batches are the source;
one stage fetches and collates, with as many threads as others have workers; order as in the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spdl.pipeline import Pipeline, PipelineBuilder

from bench.peers import LoaderSettings, Peer, Unsupported
from bench.workloads import Load, whole_batches


class SpdlThreads(Peer):
    distributions = ("spdl-core",)

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        if settings.num_workers == 0:
            raise Unsupported("needs threads")
        self._load = load
        self._threads = settings.num_workers
        self._buffer = settings.num_workers * settings.prefetch_factor
        self.prefetched = self._buffer + 2 * self._threads
        self._pipeline: Pipeline[Any] | None = None

    def epoch(self) -> Iterator[Any]:
        self.close()
        load = self._load
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        if load.iterable:  # one reader, the collate in threads
            builder.add_source(whole_batches(load.dataset, load.batch_size))  # type: ignore[arg-type]
        else:
            builder.add_source(load.index_batches())
        work = load.collate if load.iterable else self._fetch
        self._pipeline = (
            builder.pipe(work, concurrency=self._threads, output_order="input")
            .add_sink(self._buffer)
            .build(num_threads=self._threads)
        )
        self._pipeline.start()
        return self._pipeline.get_iterator()

    def _fetch(self, indices: list[int]) -> Any:
        return self._load.collate(self._load.fetch(indices))

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
            self._pipeline = None
