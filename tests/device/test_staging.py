"""The staging logic over a simulated device: random runs, and the same with one of its waits deleted."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.device import copies, pinning, session, staging
from tests.support.simulated_device import Breach
from tests.support.staging_runs import choose, run


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**32))
def test_no_run_breaks_a_rule(seed: int) -> None:
    try:
        run(seed)
    except BaseException as error:
        raise AssertionError(f"seed={seed}: {choose(seed)}") from error


class Mutant(NamedTuple):
    """A defect: `old` stands once in `module`, and becomes `new`."""

    what: str
    module: ModuleType
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a copy does not wait for what used its memory before",
        copies,
        "self._stager.wait(self._stager.side, fence)\n        self._events",
        "self._events",
    ),
    Mutant(
        "the fence stands on the wrong stream",
        copies,
        "self._record(home)",
        "self._record(self._stager.side)",
    ),
    Mutant("a batch is read before it arrives", copies, "stager.wait(stream, copy.ready)\n", "\n"),
    Mutant(
        "a transformed batch is read once its bytes are there",
        copies,
        "stager.wait(stream, copy.ready)",
        "stager.wait(stream, copy.done)",
    ),
    Mutant("a stream looks at memory that is let go of", copies, "if stream != copy.home:", "if False:"),
    Mutant("memory is shared that cannot be", copies, "if self._shares:", "if True:"),
    Mutant("a batch that moves is read on its way", copies, "stager.wait(stream, moved)\n", "\n"),
    Mutant("the place a batch moved from is let go of", copies, "stager.wait(copy.home, moved)", "pass"),
    Mutant(
        "a batch moves into memory in use",
        copies,
        "self._fenced(copy.nbytes, stream)",
        "stager.empty(copy.nbytes)",
    ),
    Mutant(
        "the slab of a batch that moved is lost",
        copies,
        "self._free.append(copy.slab)\n            copy.slab = None",
        "copy.slab = None",
    ),
    Mutant("a batch that moved is not the consumer's", copies, "copy.memory = memory\n", "pass"),
    Mutant("what the side stream made is let go of", copies, "if copy.result is not None:", "if False:"),
    Mutant("a slab is written while it is read", copies, "in slab.fences:", "in slab.fences[:0]:"),
    Mutant(
        "a slab waits only for the stream of now",
        copies,
        "{shown.shown_on, self._stager.current_stream()}",
        "{self._stager.current_stream()}",
    ),
    Mutant("a slab is too small", copies, "if slab is None or slab.nbytes < nbytes:", "if slab is None:"),
    Mutant("the ring has a slab too few", copies, "self._slabs = ahead + 1", "self._slabs = ahead"),
    Mutant(
        "a copy counts as over before it is",
        copies,
        "while running and query(running[0].done):",
        "while running:",
    ),
    Mutant(
        "blocks come back before their copies are over",
        copies,
        "[copy for copy in self._taken if copy.over]",
        "list(self._taken)",
    ),
    Mutant("blocks come back again and again", copies, "if not copy.over]", "]"),
    Mutant(
        "draining does not wait",
        copies,
        "self._stager.synchronize(self._record(self._stager.side))\n",
        "self._record(self._stager.side)\n",
    ),
    Mutant("poll waits for copies", staging, "self._copies.full or self._pinner.busy", "self._pinner.busy"),
    Mutant("poll waits for buffers", staging, "self._copies.full or self._pinner.busy", "self._copies.full"),
    Mutant("draining loses slabs", copies, "self._free += [copy.slab", "[copy.slab"),
    Mutant("the consumer runs ahead for ever", copies, "self._most = 2 * ahead", "self._most = 1000"),
    Mutant("nobody waits for a copy", copies, "            self._stager.synchronize(copy.done)\n", ""),
    Mutant(
        "a buffer is filled while it is copied from",
        pinning,
        "if buffer.copy is not None and not buffer.copy.over:",
        "if False:",
    ),
    Mutant("the copy from a buffer is forgotten", pinning, "buffer.copy = copy\n", "pass\n"),
    Mutant("blocks are unregistered under a copy", pinning, "        self._copies.settle()\n", ""),
    Mutant(
        "a block stays registered when its pages go",
        pinning,
        "self._stager.unregister(self._at.base + offset)",
        "pass",
    ),
    Mutant("the limit is not kept", pinning, "self._counters.pinned_bytes + size > self._limit", "False"),
    Mutant("the limit does not hold for buffers", pinning, "and pinned_bytes > self._limit", "and False"),
    Mutant("a failed registration stays half done", pinning, "            self.close()  #", "            #"),
    Mutant("locked bytes are not counted down", pinning, "self._counters.pinned_bytes -= size", "pass"),
    Mutant(
        "buffers are not counted down",
        pinning,
        "self._counters.pinned_bytes -= buffer.locked\n            self._buffers[at]",
        "self._buffers[at]",
    ),
    Mutant(
        "blocks of a batch that could not be copied are lost",
        staging,
        "                self._free += blocks\n                raise",
        "                raise",
    ),
    Mutant("blocks are given back twice", staging, "free, self._free = self._free, []", "free = self._free"),
    Mutant(
        "the ring is never turned", staging, "        self._copies.turn()\n        return", "        return"
    ),
    Mutant("closing does not wait", staging, "offsets = self.drain()\n", "offsets: list[int] = []\n"),
)


def mutated(mutant: Mutant) -> ModuleType:
    """The module with the defect."""
    assert mutant.module.__file__ is not None
    with open(mutant.module.__file__) as file:
        source = file.read()
    assert source.count(mutant.old) >= 1, f"{mutant.old!r} is not in {mutant.module.__name__} any more"
    module = ModuleType(mutant.module.__name__ + "_mutant")
    sys.modules[module.__name__] = module  # dataclasses and named tuples look for it there
    try:
        exec(compile(source.replace(mutant.old, mutant.new, 1), mutant.module.__file__, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    return module


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_defect_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated(mutant)
    tested = staging.Staging
    if mutant.module is copies:
        monkeypatch.setattr(session, "Copies", module.Copies)
    elif mutant.module is pinning:
        monkeypatch.setattr(session, "Pinner", module.Pinner)
    else:
        tested = module.Staging
    for seed in range(400):
        try:
            run(seed, tested)
        except (Breach, LookupError, AttributeError, AssertionError):
            return
    pytest.fail(f"{mutant.what}: not seen in 400 runs")
