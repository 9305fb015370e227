"""SPDL: its PyTorch-style loader, and its pipeline of threads, here, in a process, and in several.

The first, a ProcessPoolExecutor behind an asyncio pipeline, starts its processes in every epoch: persistent
workers are refused with a ValueError. The others are what the guide in its wheel says to compare
(`autoresearch/pipeline_optimization/prompts/knowledge`): "always test MTP, an MP region, and the best
configuration without process isolation". All have as many threads, or processes, as others have workers.

MTP is one process with threads. Its batches come through a `SharedMemorySegmentPool` where they are larger
than 1 MiB, as the guide has it. An MP region is several processes with a thread each, opened by `.to()`; of
these SPDL keeps no order. Both have a continuous source, so that they run on from one epoch to the next.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import spdl.pipeline._pipeline
from spdl.dataloader import PyTorchDataLoader, get_pytorch_dataloader
from spdl.pipeline import Pipeline, PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess
from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

from bench.peers import LoaderSettings, Peer, Unsupported, without_stderr
from bench.timing.batches import nbytes
from bench.workloads import Load, whole_batches

# SPDL stops its pipelines where Python ends, also in each forked worker of another loader: that sends "shut
# down" to the processes of a region, which fails or hangs then. The bench closes its pipelines itself.
setattr(spdl.pipeline._pipeline, "_register_stop_at_exit", lambda pipeline: None)  # noqa: B010 - not known to mypy

# Before Python 3.13 the tracker complains, with a traceback each, of segments that two processes know.
with without_stderr():
    resource_tracker.ensure_running()

# Of batches in an epoch, at most. The heaps of its workers grow by nearly every batch below 32 MB that they
# pickle: glibc's malloc does not get them back (with MALLOC_MMAP_THRESHOLD_ set they stay as they are). New
# processes begin anew; an endless epoch would be the end of the machine.
EPOCH_BYTES = 1 << 30
LEAST_EPOCH = 32  # batches

# From its guide: payloads that an arena is for; items between processes, and batches that are ready.
ARENA_FROM = 1 << 20
TRANSFER, READY = 2, 3
# Seconds that its process may wait for room, instead of 60: a lane rests while others take their turn.
RESTING_S = 3600.0
WORKER_READY = 3  # in the sink of the pipeline in each worker, which SPDL chooses


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


class _IndexBatches:
    """The index lists of an epoch, in each pass anew."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def __iter__(self) -> Iterator[list[int]]:
        return self._load.index_batches()


def _batch(load: Load, indices: list[int]) -> Any:
    return load.collate(load.fetch(indices))


class _Continuous(Peer):
    """A pipeline that is built once; its processes live until `close`."""

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        if settings.num_workers == 0:
            raise Unsupported("needs worker processes")
        if load.iterable:
            raise Unsupported("a stream has no indices to send to processes")
        self._source: Any = None
        self._pipeline: Pipeline[Any] = self._built(load, settings)
        self._pipeline.start()

    def _built(self, load: Load, settings: LoaderSettings) -> Pipeline[Any]:
        """The pipeline of this lane, which each subclass builds."""
        raise NotImplementedError

    def epoch(self) -> Iterator[Any]:
        batches: Iterator[Any] = self._pipeline.get_iterator()
        return batches

    def close(self) -> None:
        self._pipeline.stop()
        del self._pipeline
        gc.collect()  # a stopped pipeline is a cycle that holds batches, views of what closes with the source
        del self._source  # whose processes end with it


class SpdlSubprocess(_Continuous):
    def _built(self, load: Load, settings: LoaderSettings) -> Pipeline[Any]:
        threads = settings.num_workers
        ready = threads * settings.prefetch_factor
        inside: PipelineBuilder[Any, Any] = PipelineBuilder()
        inside.add_source(_IndexBatches(load), continuous=True)
        inside.pipe(partial(_batch, load), concurrency=threads, output_order="input").add_sink(ready)
        size = nbytes(next(load.share()))
        arena = None
        if size > ARENA_FROM:  # one item fits into a segment
            arena = SharedMemorySegmentPool(size + ARENA_FROM, 2 * READY + 2, acquire_timeout=RESTING_S)
        self._source = run_pipeline_in_subprocess(
            inside.get_config(),
            num_threads=threads,
            buffer_size=READY,
            mp_context=settings.start_method,
            arena=arena,
            daemon=True,  # it ends with the bench, whatever state it is in
        )
        self.prefetched = ready + 2 * threads + 2 * READY + 2
        outside: PipelineBuilder[Any, Any] = PipelineBuilder()
        return outside.add_source(self._source, continuous=True).add_sink(READY).build(num_threads=1)


class SpdlRegion(_Continuous):
    own_order = True

    def _built(self, load: Load, settings: LoaderSettings) -> Pipeline[Any]:
        workers = settings.num_workers
        processes = ProcessPoolExecutorConfig(max_workers=workers, mp_context=settings.start_method)
        # The sink's buffer, the queue of answers, and what each worker is about to send or has ready.
        queue, in_worker = max(4, 2 * workers) * TRANSFER, TRANSFER + WORKER_READY + 1
        self.prefetched = READY + queue + TRANSFER + workers * in_worker
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        builder.add_source(_IndexBatches(load), continuous=True).to(processes, buffer_size=TRANSFER)
        builder.pipe(partial(_batch, load)).to(MAIN_PROCESS, buffer_size=TRANSFER)
        with warnings.catch_warnings():  # that a fork beside threads, which other loaders have, may deadlock
            warnings.simplefilter("ignore", RuntimeWarning)
            return builder.add_sink(READY).build(num_threads=1)
