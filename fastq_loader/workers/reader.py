"""The user's objects in a worker: the dataset and its functions, their seeds, and the batches they produce.

Runs in a worker, on its main thread. Random numbers are seeded once in each worker, as in torch, or anew for
each batch. The state that a resumed epoch needs from the worker is sent to the consumer with each batch (see
`reading.reader`).
"""

from __future__ import annotations

import pickle

import torch

from fastq_loader.ipc.messages import BeginEpoch, seal, unseal
from fastq_loader.reading import datapipes, generators
from fastq_loader.reading.fetch import Fetcher
from fastq_loader.reading.reader import Reader
from fastq_loader.system.torch_names import worker as torch_worker
from fastq_loader.workers.config import Setup


class WorkerReader(Reader):
    """Reader of one worker.

    Args:
        setup: the worker's setup.

    Attributes:
        epochs: number of epochs begun.
        failure: exception that user code raised at the start of the worker or of an epoch: the worker cannot
            load anything.
        state: state of the worker after the last loaded batch, as a sealed pickle; b"" if it has no state.
        remarks: remarks on that batch, as a sealed pickle; b"" without remarks. They are `Fetcher.remark`;
            after the first batch the names of generators that the dataset has for itself, although any worker
            may load any batch; and the samples of the stack, if the epoch is profiled.
        reports: whether there may be a state or a remark; determined when an epoch begins.
    """

    def __init__(self, setup: Setup) -> None:
        plan = setup.plan
        rules = vars(plan.rules)
        super().__init__(None, None, Fetcher, rules, setup.worker, plan.workers, plan.saves)
        self.epochs = 0
        self.failure: Exception | None = None
        self.state = self.remarks = b""
        self.reports = False
        self._setup = setup
        self._private: list[str] = []  # see `remarks`
        try:
            self._start()
        except Exception as error:
            self.failure = error

    def _start(self) -> None:
        setup = self._setup
        parts = setup.plan.payload.open()  # before the seeds, as in torch: the user's modules may draw
        torch.set_num_threads(1)
        seed = generators.seed_worker(setup.base_seed, setup.worker)
        self.dataset = datapipes.apply_seed(parts["dataset"], setup.shared_seed)
        self._collate, self._make_fetcher = parts["collate_fn"], parts["make_fetcher"]
        # User code gets it from torch.utils.data.get_worker_info().
        torch_worker._worker_info = self.worker_info = torch_worker.WorkerInfo(
            id=setup.worker, num_workers=setup.plan.workers, seed=seed, dataset=self.dataset
        )
        if parts["worker_init_fn"] is not None:
            parts["worker_init_fn"](setup.worker)
        if setup.plan.shared_tasks:
            self._private = generators.held_by(self.dataset)

    def begin_epoch(self, epoch: BeginEpoch) -> None:
        """Make the fetcher of an epoch, whose batches are seeded from its base seed if there is one."""
        self.ended = False
        self.state = self.remarks = b""
        self.epochs += 1
        if self.sampler is not None:
            self.sampler.end()
            self.sampler = None
        if self.failure is not None:
            return
        if epoch.profiled:
            from fastq_loader.extras.profile.sampler import Sampler

            self.sampler = Sampler()
        setup, delivered, state = self._setup, 0, None
        try:
            if self.epochs > 1:
                self.dataset = datapipes.apply_seed(self.dataset, epoch.shared_seed)
            if epoch.resume:
                delivered, state = pickle.loads(unseal(epoch.resume, setup.token))[setup.worker]
            self.sample_seed = epoch.sample_seed
            self.begin(epoch.number, epoch.base_seed, delivered, state)
        except Exception as error:
            self.failure = error
            return
        has_policy = self._make_fetcher is not Fetcher
        self.reports = bool(self._saves or self._private or has_policy or self.sampler)

    def report(self) -> None:
        """Set the state after the last batch, and the remarks on it."""
        fetcher = self.fetcher
        state = self.state_bytes()
        self.state = seal(state, self._setup.token) if state else b""
        self.remarks = b""
        samples = self.sampler and self.sampler.taken()
        if fetcher.remark is not None or self._private or samples:
            remarks = fetcher.remark, self._private, samples
            self.remarks = seal(pickle.dumps(remarks), self._setup.token)
            fetcher.remark, self._private = None, []

    def close(self) -> None:
        """Clear the worker info at the worker's end. The dataset is freed with the reader, so that its
        `__del__` still finds its modules; it runs without worker info (as in torch from 2.14 on)."""
        torch_worker._worker_info = None
