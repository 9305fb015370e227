"""Faults that a careless change could make, the promise that each breaks, and the test file that finds it.

`python -m tests.faults` plants them, one at a time, in a copy of the repository.

A fault replaces `old` by `new` at one place of one file. `old` consists of code, because comments and texts
change more often. A user would notice the effect. The first tests of the named file find it: those that show
the promise itself, not its variations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name: the fault in plain English.
        file: the changed file, below `fastq_loader/`.
        old, new: the text that is replaced, which occurs once in the file, and the text in its place.
        promise: the broken promise: "guarantee:" and a row of the README's table ("death 2" is the second row
            of a subject); "rule" and a number of `fastq_loader/README.md`; "row" and one of
            `tests/README.md`.
        found_by: the test file that finds it, below `tests/`.
    """

    name: str
    file: str
    old: str
    new: str
    promise: str
    found_by: str

    @property
    def room(self) -> str:
        """The room of the package in which it lies."""
        folders = self.file.removesuffix(".py").split("/")
        return ".".join(folders[: 1 + (folders[0] == "extras")])


FAULTS = (
    # ---- torch's loader
    Fault(
        "patches of torch's loader are ignored",
        "system/torch_patches.py",
        "if value is not kept:",
        "if value is None:",
        "rule 15",
        "system/test_torch_patches.py",
    ),
    Fault(
        "a frozen clock reaches the loader",
        "system/unpatched.py",
        "_spec.loader.exec_module(time)",
        "import time",
        "row P15",
        "system/test_unpatched.py",
    ),
    # ---- scheduling
    Fault(
        "an object loses the list that it shares with its batch",
        "packing/pack.py",
        "if walker.objects and not self._allocator.for_device:",
        "if len(walker.objects) > 1 and not self._allocator.for_device:",
        "row B7",
        "end_to_end/test_contents.py",
    ),
    Fault(
        "the last batch of an epoch is lost",
        "scheduling/in_flight.py",
        "while self.head < self.drawn:",
        "while self.head < self.drawn - 1:",
        "guarantee: order",
        "scheduling/test_scheduler.py",
    ),
    Fault(
        "the answer of an earlier attempt is accepted",
        "scheduling/scheduler.py",
        "if batch is None or batch.attempt != answer.attempt:",
        "if batch is None:",
        "rule 5",
        "consumer/test_answers.py",
    ),
    Fault(
        "the window that a user sets is ignored",
        "scheduling/schedules.py",
        "fixed, ahead = schedule.window, prefetch * workers",
        "fixed, ahead = None, prefetch * workers",
        "row R6",
        "scheduling/test_schedules.py",
    ),
    # ---- memory
    Fault(
        "a block is used again while a forked child sees it",
        "memory/arena.py",
        "if born >= seen]",
        "]",
        "guarantee: memory",
        "memory/test_arena.py",
    ),
    Fault(
        "the pages of blocks that nobody needs are kept",
        "memory/pool.py",
        "        self.arena.mapping.punch(block.offset, block.size)\n",
        "",
        "guarantee: memory",
        "memory/test_pool.py",
    ),
    Fault(
        "the descriptor of the shared memory stays open",
        "memory/arena.py",
        "            fd, self.fd = self.fd, -1\n            os.close(fd)\n",
        "            self.fd = -1\n",
        "guarantee: leftovers",
        "memory/test_arena.py",
    ),
    # ---- packing
    Fault(
        "a batch shares memory with the tensors that its dataset keeps",
        "packing/pack.py",
        "copies = self._allocator.copy_held(used)",
        "copies = {}",
        "rule 1",
        "end_to_end/test_empty.py",
    ),
    Fault(
        "a handle may reach beyond its block",
        "packing/unpack.py",
        "if not (0 <= offset <= self._arena.mapping.end - size and start >= 0 and need <= size):",
        "if not (0 <= offset <= self._arena.mapping.end - size and start >= 0):",
        "rule 1",
        "packing/test_unpack.py",
    ),
    Fault(
        "the traceback of the worker is lost",
        "packing/pickling.py",
        '    BaseException.__setattr__(error, "__cause__", WorkerTraceback(where))\n',
        "",
        "guarantee: errors",
        "packing/test_pickling.py",
    ),
    # ---- ipc
    Fault(
        "pickles without the token of the pool are read",
        "ipc/messages.py",
        "if not hmac.compare_digest(sealed[:TOKEN_BYTES], token):",
        "if len(sealed) < TOKEN_BYTES:",
        "rule 10",
        "ipc/test_messages.py",
    ),
    Fault(
        "two workers claim one batch, because the lock is not taken",
        "ipc/claim_table.py",
        "if not locks.try_lock(self._fd, at << _WHO, who):",
        "if False:",
        "rule 5",
        "ipc/test_claim_table.py",
    ),
    Fault(
        "a worker takes tasks from any process",
        "ipc/sockets.py",
        "            self._socket.setsockopt(zmq.IPC_FILTER_PID, process)\n",
        "            pass\n",
        "rule 10",
        "ipc/test_sockets.py",
    ),
    # ---- workers
    Fault(
        "a dead worker is not noticed",
        "ipc/sockets.py",
        "        self._epoll.register(descriptor, select.EPOLLIN)\n",
        "        pass\n",
        "guarantee: death",
        "ipc/test_sockets.py",
    ),
    Fault(
        "workers outlive a consumer that was killed",
        "workers/main.py",
        "    children.leave_with(setup.consumer)\n",
        "",
        "guarantee: death 2",
        "end_to_end/test_lifecycle.py",
    ),
    Fault(
        "the workers of a loader in a reference cycle live on",
        "workers/group.py",
        "_in_use.add(self._socket)",
        "_in_use.add(self)",
        "row P6",
        "end_to_end/test_lifecycle.py",
    ),
    Fault(
        "a worker takes a later batch before the one that is wanted next",
        "workers/task_queue.py",
        'insort(self.waiting, task, key=attrgetter("seq"))',
        "self.waiting.append(task)",
        "rule 4",
        "workers/test_main.py",
    ),
    # ---- consumer
    Fault(
        "an interrupt while next() waits ends the iteration",
        "consumer/event_loop.py",
        "        self._gate.phase = WAITING\n",
        "",
        "guarantee: interrupts",
        "end_to_end/test_hard_knocks.py",
    ),
    Fault(
        "samples that could not be read are not counted against the limit",
        "extras/bad_samples/records.py",
        "if self._errors.allows(self.bad, self.read):",
        "if self._errors.allows(len(found), self.read):",
        "row E1",
        "extras/bad_samples/test_bad_samples.py",
    ),
    # ---- iterators
    Fault(
        "a hint comes again in every epoch",
        "extras/insight/hints.py",
        "            self._resources.hinted.add(kind)\n",
        "",
        "row W1",
        "extras/insight/test_hints.py",
    ),
    Fault(
        "the error of a sampler counts as that of the next batch",
        "epoch/serial.py",
        "self.outcome = self._raised(error, order.drawn - 1)",
        "self.outcome = self._raised(error, order.drawn)",
        "guarantee: errors",
        "end_to_end/test_faults.py",
    ),
    Fault(
        "what the workers held stays when their epoch is over",
        "epoch/multiprocess.py",
        '            self.pool.close("it was exhausted")\n',
        "            pass\n",
        "guarantee: leftovers",
        "epoch/test_iteration.py",
    ),
    Fault(
        "the seed is drawn before the sampler's",
        "epoch/base.py",
        "        self._record.begin(packed=self._num_workers > 0)\n"
        "        self._base_seed = self._record.draw_base_seed(",
        "        self._base_seed = self._record.draw_base_seed(loader.generator)\n"
        "        self._record.begin(packed=self._num_workers > 0)\n        int(",
        "row R1",
        "epoch/test_iteration.py",
    ),
    # ---- resume
    Fault(
        "what changed in a sampler between two epochs is not noticed",
        "epoch/samplers.py",
        "return self.still and len(seen) == len(self._seen) and all(map(is_, seen, self._seen))",
        "return self.still and len(seen) == len(self._seen)",
        "row S1",
        "extras/resume/test_samplers.py",
    ),
    Fault(
        "an order that does not come back is not noticed",
        "extras/resume/epoch.py",
        "self._differs = self.digest != expected",
        "self._differs = False",
        "row S1",
        "extras/resume/test_zoo.py",
    ),
    Fault(
        "a state from the middle of the first draw begins after it",
        "extras/resume/state.py",
        "first = record.first_states or record.shared_now()",
        "first = record.shared_now()",
        "row S1",
        "extras/resume/test_state.py",
    ),
    Fault(
        "after a break, the place of a stream without a state stays unknown",
        "scheduling/progress.py",
        "if not state and last == UNKNOWN:",
        "if False:",
        "row S1",
        "end_to_end/test_resume.py",
    ),
    # ---- reading
    Fault(
        "numpy draws the same in all workers",
        "reading/generators.py",
        "    numpy_random.seed(numpy_random.SeedSequence(entropy).generate_state(4))\n",
        "    numpy_random.seed(base_seed & 0xFFFFFFFF)\n",
        "guarantee: random numbers",
        "reading/test_generators.py",
    ),
    Fault(
        "the random numbers of a batch depend on who loads it",
        "reading/reader.py",
        'number = self.requested * self._readers + self._number if self._rules["iterable"] else seq',
        "number = self.requested * self._readers + self._number",
        "guarantee: random numbers 2",
        "end_to_end/test_dynamic.py",
    ),
    Fault(
        "a search for generators that ended early counts as complete",
        "reading/generators.py",
        "                all_seen &= complete\n",
        "",
        "rule 13",
        "reading/test_generators.py",
    ),
    Fault(
        "ranks draw other orders by a generator that was not found",
        "extras/samplers/samplers.py",
        "again = 0 if is_certain else",
        "again = 0 and",
        "guarantee: random numbers 2",
        "extras/samplers/test_samplers.py",
    ),
    Fault(
        "rows of a concatenation are read where its fields no longer are",
        "reading/tables.py",
        " or addresses != list(map(_ADDRESS, fields))",
        "",
        "row B7",
        "reading/test_tables.py",
    ),
    Fault(
        "a collate function of the user's for numbers is not called",
        "reading/collate.py",
        "if kind in STACKERS and stack is STACKERS[kind][0]:",
        "if kind in STACKERS:",
        "row B7",
        "reading/test_collate.py",
    ),
    # ---- device
    Fault(
        "pinned batches are copied by all intra-op threads",
        "device/page_lock.py",
        "ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)",
        "copy.copy_(tensor)",
        "guarantee: device",
        "device/test_page_lock.py",
    ),
    Fault(
        "in containers other than lists and dicts, torch's threads page-lock",
        "device/page_lock.py",
        '"pin_memory": page_locked}',
        "}",
        "guarantee: device",
        "device/test_page_lock.py",
    ),
    Fault(
        "a batch is handed out before its copy has arrived",
        "device/copies.py",
        "        backend.wait(stream, copy.ready)\n",
        "",
        "guarantee: device",
        "device/test_batches.py",
    ),
    Fault(
        "a buffer is filled while a copy still reads it",
        "device/pinning.py",
        "            self._copies.wait_for(buffer.copy)\n",
        "",
        "guarantee: device",
        "device/test_pinning.py",
    ),
    Fault(
        "the sizes of a packed sequence go to the device, where torch refuses them",
        "packing/pickling.py",
        "if type(value) is PackedSequence and self._for_device:",
        "if False:",
        "row B7",
        "device/test_batches.py",
    ),
    Fault(
        "nothing warns that memory cannot be page-locked",
        "device/staging.py",
        "        self._policy.warn()\n",
        "",
        "guarantee: device",
        "device/test_pinning.py",
    ),
    Fault(
        "a batch that is begun in inference mode cannot be trained with",
        "device/staging.py",
        "with torch.inference_mode(False), torch.set_grad_enabled(grad):",
        "with torch.set_grad_enabled(grad):",
        "guarantee: device",
        "device/test_staging.py",
    ),
    Fault(
        "fields on a device share a version counter, so autograd refuses its own",
        "packing/device_views.py",
        "unsafe_split_with_sizes(sizes)",
        "split_with_sizes(sizes)",
        "row B4",
        "packing/test_device_views.py",
    ),
    # ---- statistics, tracing and insight
    Fault(
        "copies to page-locked memory are told of only where they are the limit",
        "extras/insight/advice.py",
        "            chosen[_pinning] = None",
        "            chosen.pop(_pinning, None)",
        "row S2",
        "extras/insight/test_advice.py",
    ),
    Fault(
        "the time of the training step is not counted",
        "extras/insight/causes.py",
        'found["consumer"] = int(records.given[-1] - records.asked[0]) - inside if len(own) else 0',
        'found["consumer"] = 0',
        "row S2",
        "extras/insight/test_causes.py",
    ),
    Fault(
        "two traces write into one file",
        "extras/tracing/trace.py",
        "        locks.lock_file(fd, wait=False)\n",
        "        pass\n",
        "row S3",
        "extras/tracing/test_trace.py",
    ),
    Fault(
        "more workers are chosen for a gain within the noise",
        "extras/insight/chooser.py",
        "band = math.log(max(seconds[setting] / least, 1.0)) // math.log1p(NOISE)",
        "band = seconds[setting] / least",
        "row A3",
        "extras/insight/test_chooser.py",
    ),
    # ---- tools
    Fault(
        "compare takes other types, dtypes and strides for the same batch",
        "extras/tools/leaves.py",
        'for part in (leaf.path.encode(errors="surrogatepass"), leaf.kind.encode(), leaf.data):',
        'for part in (leaf.path.encode(errors="surrogatepass"), leaf.data):',
        "row C1",
        "extras/tools/test_comparing.py",
    ),
    Fault(
        "the lines of a library are taken for the user's",
        "extras/profile/profile.py",
        "if not _is_library(file)]",
        "]",
        "row C2",
        "extras/profile/test_profile.py",
    ),
    Fault(
        "persistent workers are sampled after the block of profile(), too",
        "workers/reader.py",
        "            self.sampler.end()\n",
        "            pass\n",
        "row C2",
        "extras/profile/test_profile.py",
    ),
    # ---- caching and sharing
    Fault(
        "a damaged value of a cache is handed out",
        "extras/cached/folder.py",
        "if values.checksum(data[_PREFIX.size :]) != checksum:",
        "if False:",
        "row K3",
        "extras/cached/test_cached.py",
    ),
    Fault(
        "a value of another key is handed out",
        "extras/cached/values.py",
        "if its_key != key:",
        "if False:",
        "row K1",
        "extras/cached/test_values.py",
    ),
    Fault(
        "objects of one class share the values of a cache",
        "extras/cached/instances.py",
        "number is None or (number.owner is not None and number.owner() is not instance)",
        "number is None",
        "row K2",
        "extras/cached/test_cached.py",
    ),
    Fault(
        "values that a power cut may have lost are read",
        "extras/cached/mark.py",
        'is_whole = mark["using"] in (None, using(values))',
        "is_whole = True",
        "row K3",
        "extras/cached/test_folder.py",
    ),
    Fault(
        "a forked child uses what its parent has open",
        "extras/cached/folder.py",
        "if self._pid == process_id.pid or self._is_busy:",
        "if self._pid == process_id.pid:",
        "row K3",
        "extras/cached/test_folder.py",
    ),
    Fault(
        "values that a child writes after its parent has closed the folder count as synced",
        "extras/cached/folder.py",
        "if (mark := marks.read(self._lock)) is not None:",
        "if mark := None:",
        "row K3",
        "extras/cached/test_folder.py",
    ),
    Fault(
        "a folder that others may write to is read",
        "extras/cached/mark.py",
        "if found.st_mode & 0o022:",
        "if False:",
        "row K3",
        "extras/cached/test_folder.py",
    ),
    Fault(
        "numbers of two types of numpy's have one key",
        "extras/cached/keys.py",
        "about = library, kind.__qualname__, str(value.dtype)",
        "about = (library,)",
        "row K1",
        "extras/cached/test_keys.py",
    ),
    Fault(
        "each worker begins with a budget for checks of its own",
        "extras/cached/checks.py",
        "counters.began = counters.began or time.monotonic_ns()",
        "counters.began = time.monotonic_ns()",
        "row K2",
        "extras/cached/test_checks.py",
    ),
    Fault(
        "a check that finds another value does not end the cache",
        "extras/cached/cached.py",
        "        if counters.is_marked:\n",
        "        if False:\n",
        "row K2",
        "extras/cached/test_checks.py",
    ),
    Fault(
        "the values of another worker are believed",
        "extras/cached/checks.py",
        "if writer not in self._known:",
        "if False:",
        "row K2",
        "extras/cached/test_checks.py",
    ),
    Fault(
        "a checked hit takes other seeds than one that is not checked",
        "extras/images/sample_seeds.py",
        "reader.newest = newest\n\n\ndef take",
        "newest = None\n\n\ndef take",
        "row K1",
        "extras/images/test_encoded.py",
    ),
    Fault(
        "numbers that differ more than by rounding are equal",
        "extras/cached/equal.py",
        "close * largest",
        "0.1 * largest",
        "row K2",
        "extras/cached/test_checks.py",
    ),
    Fault(
        "values that were drawn at random are cached",
        "extras/cached/cached.py",
        "        if drew:\n",
        "        if False:\n",
        "row K1",
        "extras/cached/test_cached.py",
    ),
    Fault(
        "memory that another user has named is read",
        "extras/share/named.py",
        "if os.fstat(fd).st_uid != os.getuid():",
        "if os.fstat(fd).st_uid < 0:",
        "rule 10",
        "extras/share/test_share.py",
    ),
    # ---- remote and integrations
    Fault(
        "a far worker lets in whoever has no token",
        "extras/remote/connection.py",
        "if not hmac.compare_digest(mac, _mac(token, *parts)):",
        "if len(mac) != _MAC_BYTES:",
        "row X1",
        "extras/remote/test_connection.py",
    ),
    Fault(
        "a resumed StatefulDataLoader draws other random numbers",
        "extras/resume/stateful_dataloader.py",
        "LIKE_TORCHDATA if",
        "RoundRobin() if",
        "row S1",
        "extras/resume/test_stateful_dataloader.py",
    ),
    # ---- preemption, system, arguments, loader, resources, errors, command line
    Fault(
        "the handler that a program had for the signal is not called",
        "extras/recovery/preemption.py",
        "        if callable(before):\n            before(number, frame)\n",
        "",
        "row P14",
        "end_to_end/test_preemption.py",
    ),
    Fault(
        "a property of a user's dataset is called for advice",
        "system/attributes.py",
        'return default if hasattr(type(member), "__get__") and not callable(member) else member',
        "return getattr(part, name, default)",
        "rule 13",
        "end_to_end/test_untouched.py",
    ),
    Fault(
        "the worker of a stream is replaced, and reads it from the beginning",
        "options.py",
        "if is_iterable(loader) and options.workers.restarts(iterable=True):",
        "if is_iterable(loader) and options.workers.is_remote:",
        "rule 5",
        "test_options.py",
    ),
    Fault(
        "the copy of a loader has its workers",
        "loader.py",
        'return {**vars(self), "_iterator": None}',
        "return {**vars(self)}",
        "row I10",
        "end_to_end/test_hooks.py",
    ),
    Fault(
        "close() does not wait for its workers",
        "epoch/resources.py",
        "        stopping.wait(self.counters)\n",
        "",
        "guarantee: leftovers",
        "end_to_end/test_hard_knocks_workers.py",
    ),
    Fault(
        "an attribute of a user's own error is overwritten",
        "errors.py",
        "            if not hasattr(error, name):\n                setattr(error, name, value)\n",
        "            setattr(error, name, value)\n",
        "guarantee: errors",
        "test_errors.py",
    ),
    Fault(
        "compare on the shell succeeds although the batches differ",
        "extras/tools/command.py",
        "return 0 if found.equal else 1",
        "return 0",
        "row C1",
        "extras/tools/test_comparing.py",
    ),
    # ---- extras: images
    Fault(
        "all samples of a batch have the crop of the first one",
        "extras/images/encoded.py",
        "[sample.seed_of_this_batch() for sample in samples]",
        "[samples[0].seed_of_this_batch() for sample in samples]",
        "guarantee: random numbers",
        "extras/images/test_encoded.py",
    ),
    Fault(
        "a copy of a sample that a dataset keeps has the crop of the epoch before",
        "extras/images/encoded.py",
        "renews or now not in (None, self._batch)",
        "renews",
        "guarantee: random numbers",
        "extras/images/test_encoded.py",
    ),
    Fault(
        "an image that pillow has turned is turned again",
        "extras/images/decoders.py",
        '1 if opened.format == "TIFF" else ',
        "",
        "row G1",
        "extras/images/test_decoders.py",
    ),
    Fault(
        "a broken header of an image is found in the consumer only",
        "extras/images/encoded.py",
        "header or read_header(data, name)",
        "header or Header(1, 1, 0)",
        "row E1",
        "extras/images/test_headers.py",
    ),
    Fault(
        "a thread decodes batches that were dropped",
        "extras/images/ahead.py",
        "self._queue.put((weakref.ref(ticket), ",
        "self._queue.put((lambda: ticket, ",
        "row G1",
        "device/test_images.py",
    ),
    Fault(
        "a fork does not wait for the thread that decodes",
        "extras/images/gpu.py",
        "before=before_fork, after_in_parent",
        "before=_after_fork, after_in_parent",
        "row G1",
        "extras/images/test_ahead.py",
    ),
    Fault(
        "a GPU decodes into memory that queued work still reads",
        "extras/images/gpu.py",
        "    wait(stream)  # queued work",
        "    # queued work",
        "rule 1",
        "extras/images/test_gpu.py",
    ),
)
