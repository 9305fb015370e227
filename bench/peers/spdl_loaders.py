"""SPDL: its PyTorch-style loader, a ProcessPoolExecutor behind an asyncio pipeline, and its thread pipeline.

Both in order, as torch's and ours are. Processes are started in every epoch: persistent workers are refused
with a ValueError. Threads fetch and collate in the consumer's own process, as many as others have workers;
SPDL's documentation recommends them where the work lets go of the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spdl.dataloader import PyTorchDataLoader, get_pytorch_dataloader
from spdl.pipeline import Pipeline, PipelineBuilder

from bench.peers import LoaderSettings, Peer, Unsupported
from bench.timing.batches import nbytes
from bench.workloads import Load, whole_batches

# Of batches in an epoch, at most. The heaps of its workers grow by nearly every batch below 32 MB that they
# pickle: glibc's malloc does not get them back (with MALLOC_MMAP_THRESHOLD_ set they stay as they are). New
# processes begin anew; an endless epoch would be the end of the machine.
EPOCH_BYTES = 1 << 30
LEAST_EPOCH = 32  # batches


class SpdlProcesses(Peer):
    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        if load.iterable:
            raise Unsupported("IterableDataset is not supported (its own words)")
        if settings.num_workers == 0:
            raise Unsupported("needs worker processes")
        whole = load.batches or len(load.dataset) // load.batch_size  # type: ignore[arg-type]
        most = EPOCH_BYTES // max(1, nbytes(next(load.share())))
        load = replace(load, batches=min(whole, max(most, LEAST_EPOCH)))
        # The sink's buffer, one batch in each worker, one between.
        self.prefetched = settings.num_workers * (settings.prefetch_factor + 2)
        self._epoch: Iterator[Any] | None = None
        sampler: Any = load.sampler()  # any iterable, as for torch
        self._loader: PyTorchDataLoader[Any] = get_pytorch_dataloader(
            load.dataset,
            batch_size=load.batch_size,
            sampler=sampler,
            collate_fn=load.collate_fn,
            drop_last=True,
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            multiprocessing_context=settings.start_method,
            in_order=True,
        )

    def epoch(self) -> Iterator[Any]:
        self._epoch = iter(self._loader)
        return self._epoch

    def close(self) -> None:
        if self._epoch is not None:
            self._epoch.close()  # type: ignore[attr-defined]  # a generator: its end stops the pipeline
            self._epoch = None
        # The pickled dataset lies in a segment that nobody else unlinks before the program's end.
        self._loader._shmem.close()
        self._loader._shmem.unlink()


class SpdlThreads(Peer):
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
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        self._add_stages(builder, {"concurrency": self._threads, "output_order": "input"})
        self._pipeline = builder.add_sink(self._buffer).build(num_threads=self._threads)
        self._pipeline.start()
        batches: Iterator[Any] = self._pipeline.get_iterator()
        return batches

    def _add_stages(self, builder: PipelineBuilder[Any, Any], threads: dict[str, Any]) -> None:
        """Add the source, and the stages that make batches of it; `threads` are arguments of these."""
        load = self._load
        if load.iterable:  # one reader, the collate in threads
            source = whole_batches(load.dataset, load.batch_size)  # type: ignore[arg-type]
            builder.add_source(source).pipe(load.collate, **threads)
        else:
            builder.add_source(load.index_batches())
            builder.pipe(lambda indices: load.collate(load.fetch(indices)), **threads)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
            self._pipeline = None
