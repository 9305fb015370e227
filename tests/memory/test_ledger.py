"""The ledger of blocks, against a model that keeps a dict of states and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastq_loader.errors import InvalidTransition
from fastq_loader.memory.demand import KINDS
from fastq_loader.memory.ledger import (
    BLOCK_TRANSITIONS,
    FILLED,
    FREE,
    GRANTED,
    HELD,
    PAGE,
    PROMISED,
    SMALLEST,
    WORTH_A_PROMISE,
    BlockLedger,
    size_class,
)

WORKERS = 3
LOOKED_AT = (HELD, PROMISED)
PATIENT = 12  # tasks, in place of a thousand
REGION = 1 << 40  # bytes of address range for each worker in these tests


@pytest.fixture(autouse=True, scope="module")
def _small_blocks_are_promised() -> Iterator[None]:
    """The tests count in blocks of a few kilobytes, which are not worth a promise in real life."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastq_loader.memory.ledger.WORTH_A_PROMISE", 0)
        patch.setattr("fastq_loader.memory.demand.PATIENCE", PATIENT)
        patch.setattr("fastq_loader.memory.demand.EXPECTED", PATIENT)
        yield


@pytest.mark.parametrize("nbytes", [SMALLEST, WORTH_A_PROMISE // 2, WORTH_A_PROMISE])
def test_only_large_blocks_are_worth_a_promise(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastq_loader.memory.ledger.WORTH_A_PROMISE", WORTH_A_PROMISE)
    ledger = BlockLedger()
    ledger.adopt(0, [(0, size_class(nbytes))])
    ledger.fill(0, [(0, nbytes)])
    ledger.deliver([0])
    promised = ((0, size_class(nbytes)),) if nbytes >= WORTH_A_PROMISE else ()
    assert ledger.grant(1) == ((), promised)


# ---- size classes -----------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 44),
    st.builds(lambda power, off: max((1 << power) + off, 0), st.integers(10, 44), st.integers(-2, 2)),
)


@settings(deadline=None, max_examples=300)
@given(SIZES)
@example(SMALLEST)
@example(SMALLEST + 1)
def test_a_size_class_fits_and_wastes_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size >= SMALLEST
    assert size % PAGE == 0
    assert size_class(size) == size
    if nbytes > SMALLEST:
        assert 4 * size <= 5 * nbytes


@settings(deadline=None, max_examples=300)
@given(SIZES, SIZES)
def test_size_classes_are_monotone(one: int, other: int) -> None:
    assert size_class(min(one, other)) <= size_class(max(one, other))


def test_there_are_four_size_classes_between_powers_of_two() -> None:
    for power in range(17, 30):
        step = (1 << power) // 64
        sizes = {size_class(nbytes) for nbytes in range((1 << power) + 1, (2 << power) + 1, step)}
        assert sizes == {(1 << power) * quarters // 4 for quarters in (5, 6, 7, 8)}


# ---- the table --------------------------------------------------------------------------------------

EVENTS: dict[str, Callable[[BlockLedger, int], object]] = {
    "fill": lambda ledger, offset: ledger.fill(0, [(offset, SMALLEST)]),
    "return": lambda ledger, offset: ledger.give_back(0, [offset]),
    "decline": lambda ledger, offset: ledger.give_back(0, [offset]),
    "deliver": lambda ledger, offset: ledger.deliver([offset]),
    "drop": lambda ledger, offset: ledger.drop(offset),
    "release": lambda ledger, offset: ledger.release(offset),
}

ROADS: dict[str, tuple[str, ...]] = {
    FREE: ("return",),
    GRANTED: (),
    FILLED: ("fill",),
    HELD: ("fill", "deliver"),
    PROMISED: ("fill", "deliver", "promise"),
}


def block_in(state: str) -> BlockLedger:
    """A ledger with one block, at offset 0, that worker 0 made."""
    ledger = BlockLedger()
    ledger.adopt(0, [(0, SMALLEST)])
    for event in ROADS[state]:
        if event == "promise":
            assert ledger.grant(0) == ((), ((0, SMALLEST),))
        else:
            EVENTS[event](ledger, 0)
    assert ledger.states() == {0: state}
    return ledger


def test_the_table_lists_the_states_and_no_others() -> None:
    assert set(BLOCK_TRANSITIONS) == {FREE, GRANTED, FILLED, HELD, PROMISED}
    assert {state for events in BLOCK_TRANSITIONS.values() for state in events.values()} == set(ROADS)
    events = {event for events in BLOCK_TRANSITIONS.values() for event in events}
    assert events == {*EVENTS, "grant", "promise", "writer_dead"}


def test_only_these_events_free_a_block() -> None:
    freeing = {(s, e) for s, events in BLOCK_TRANSITIONS.items() for e, to in events.items() if to == FREE}
    assert freeing == {
        (GRANTED, "return"),
        (GRANTED, "writer_dead"),
        (FILLED, "drop"),
        (HELD, "release"),
    }


#: Every state with every event; giving a block back is one of two events, by the state that it meets.
MEETINGS = [
    (state, event)
    for state in BLOCK_TRANSITIONS
    for event in EVENTS
    if {state, event} not in ({PROMISED, "return"}, {GRANTED, "decline"})
]


@pytest.mark.parametrize(("state", "event"), MEETINGS)
def test_every_event_in_every_state_is_as_the_table_says(state: str, event: str) -> None:
    ledger = block_in(state)
    target = BLOCK_TRANSITIONS[state].get(event)
    if target is None:
        with pytest.raises(InvalidTransition):
            EVENTS[event](ledger, 0)
        assert ledger.states() == {0: state}
    else:
        EVENTS[event](ledger, 0)
        assert ledger.states() == {0: target}
    ledger.check()


@pytest.mark.parametrize("state", list(BLOCK_TRANSITIONS))
def test_only_a_grant_dies_with_its_writer(state: str) -> None:
    ledger = block_in(state)
    ledger.writer_dead(1)
    assert ledger.states() == {0: state}
    ledger.writer_dead(0)
    assert ledger.states() == {0: BLOCK_TRANSITIONS[state].get("writer_dead", state)}
    ledger.check()


@pytest.mark.parametrize("state", [GRANTED, FILLED, HELD, PROMISED])
def test_only_a_free_block_is_granted(state: str) -> None:
    ledger = block_in(state)
    ledger.adopt(1, [(REGION, SMALLEST)])
    ledger.fill(1, [(REGION, SMALLEST)])  # so that a batch's needs are known
    assert ledger.grant(0)[0] == ()
    assert ledger.states()[0] == (PROMISED if state == HELD else state)


@pytest.mark.parametrize("state", [FREE, GRANTED, FILLED, PROMISED])
def test_only_a_held_block_is_promised(state: str) -> None:
    ledger = block_in(state)
    assert ledger.grant(0)[1] == ()


def test_only_blocks_of_the_newest_batch_are_promised_and_each_once() -> None:
    ledger = BlockLedger()
    ledger.adopt(0, [(at * SMALLEST, SMALLEST) for at in range(3)])
    for at in range(3):
        ledger.fill(0, [(at * SMALLEST, 10)])
        ledger.deliver([at * SMALLEST])
    assert ledger.grant(1) == ((), ((2 * SMALLEST, SMALLEST),))
    assert ledger.grant(0) == ((), ())
    ledger.check()


def test_a_promise_comes_true_with_the_release() -> None:
    ledger = block_in(PROMISED)
    with pytest.raises(InvalidTransition):
        ledger.fill(0, [(0, 10)])
    ledger.release(0)
    assert ledger.states() == {0: GRANTED}
    assert ledger.free_blocks == 0
    assert ledger.held() == []
    ledger.fill(0, [(0, 10)])
    ledger.check()


def test_a_promise_that_was_declined_can_be_made_again() -> None:
    ledger = block_in(PROMISED)
    ledger.give_back(0, [0])
    assert ledger.states() == {0: HELD}
    assert ledger.held() == [(0, SMALLEST)]
    assert ledger.grant(1) == ((), ((0, SMALLEST),))
    with pytest.raises(InvalidTransition, match="worker 0"):
        ledger.give_back(0, [0])
    ledger.check()


def test_a_promised_block_that_is_let_go_and_then_returned_is_free() -> None:
    ledger = block_in(PROMISED)
    ledger.release(0)
    ledger.give_back(0, [0])
    assert ledger.states() == {0: FREE}
    ledger.check()


@pytest.mark.parametrize("event", list(EVENTS))
def test_events_of_unknown_blocks_raise(event: str) -> None:
    ledger = block_in(GRANTED)
    with pytest.raises(InvalidTransition, match="no block at offset 4096"):
        EVENTS[event](ledger, 4096)
    assert ledger.states() == {0: GRANTED}


def test_a_worker_fills_and_returns_its_own_blocks_only() -> None:
    ledger = block_in(GRANTED)
    with pytest.raises(InvalidTransition, match="worker 1"):
        ledger.fill(1, [(0, 10)])
    with pytest.raises(InvalidTransition, match="worker 1"):
        ledger.give_back(1, [0])
    assert ledger.states() == {0: GRANTED}


def test_a_batch_larger_than_its_block_raises() -> None:
    ledger = block_in(GRANTED)
    with pytest.raises(InvalidTransition, match="do not fit"):
        ledger.fill(0, [(0, SMALLEST + 1)])


def test_a_known_block_is_not_adopted_again() -> None:
    ledger = block_in(HELD)
    with pytest.raises(InvalidTransition, match="known already"):
        ledger.adopt(0, [(0, SMALLEST)])
    assert ledger.states() == {0: HELD}


@pytest.mark.parametrize("size", [0, 1, PAGE, SMALLEST - 1, SMALLEST + 1, SMALLEST + PAGE])
def test_a_size_that_is_no_size_class_is_not_adopted(size: int) -> None:
    ledger = BlockLedger()
    with pytest.raises(InvalidTransition, match="not a block size"):
        ledger.adopt(0, [(0, size)])
    assert len(ledger) == 0


def test_check_finds_overlapping_blocks() -> None:
    ledger = BlockLedger()
    ledger.adopt(0, [(0, 2 * SMALLEST)])
    ledger.adopt(1, [(SMALLEST, SMALLEST)])
    with pytest.raises(AssertionError, match="overlap"):
        ledger.check()


# ---- grants -----------------------------------------------------------------------------------------


def test_a_grant_is_shaped_like_the_last_batch() -> None:
    ledger = BlockLedger()
    large, middle = size_class(10 << 20), size_class(200_000)
    ledger.adopt(0, [(0, large), (large, middle), (large + middle, middle)])
    used = [(0, 10 << 20), (large, 200_000)]
    ledger.fill(0, used)
    ledger.give_back(0, [large + middle])
    for offset, _ in used:
        ledger.drop(offset)
    granted, promised = ledger.grant(1)
    assert promised == ()
    assert [size for _, size in granted] == [large, middle]
    assert ledger.free_blocks == 1
    ledger.check()


def test_the_warmest_block_is_granted_first() -> None:
    ledger = BlockLedger()
    ledger.adopt(0, [(at * SMALLEST, SMALLEST) for at in range(3)])
    for at in range(3):
        ledger.fill(0, [(at * SMALLEST, 10)])
    for at in (1, 2, 0):
        ledger.drop(at * SMALLEST)
    assert ledger.grant(0)[0] == ((0, SMALLEST),)
    assert ledger.grant(0)[0] == ((2 * SMALLEST, SMALLEST),)


def test_a_block_twice_as_large_will_do_and_a_larger_one_will_not() -> None:
    for size, fits in ((2 * SMALLEST, True), (size_class(2 * SMALLEST + 1), False)):
        ledger = BlockLedger()
        ledger.adopt(0, [(0, SMALLEST), (SMALLEST, size)])
        ledger.fill(0, [(0, 10)])
        ledger.give_back(0, [SMALLEST])
        assert ledger.grant(1)[0] == (((SMALLEST, size),) if fits else ())


def test_blocks_of_a_dead_worker_are_granted_to_others() -> None:
    ledger = BlockLedger()
    ledger.adopt(0, [(0, SMALLEST), (SMALLEST, SMALLEST)])
    ledger.fill(0, [(SMALLEST, 10)])
    assert ledger.grant(1) == ((), ())
    ledger.writer_dead(0)
    assert ledger.states() == {0: FREE, SMALLEST: FILLED}
    assert ledger.grant(1) == (((0, SMALLEST),), ())
    ledger.check()


# ---- trimming ---------------------------------------------------------------------------------------


def kept_batches(number: int) -> BlockLedger:
    """A ledger after a loop kept `number` batches of one block and dropped them all."""
    ledger = BlockLedger()
    for at in range(number):
        ledger.adopt(0, [(at * SMALLEST, SMALLEST)])
        ledger.fill(0, [(at * SMALLEST, SMALLEST)])
        ledger.deliver([at * SMALLEST])
    assert ledger.trim(2) == []  # the user's wish
    for at in range(number):
        ledger.release(at * SMALLEST)
    return ledger


def test_trimming_keeps_what_some_batches_need() -> None:
    ledger = kept_batches(10)
    cold = ledger.trim(3)
    assert cold == [(at * SMALLEST, SMALLEST) for at in range(7)]  # the coldest
    assert ledger.nbytes == ledger.free_bytes == 3 * SMALLEST
    assert ledger.trim(3) == []
    ledger.check()


def test_blocks_that_users_hold_do_not_count_as_spare() -> None:
    ledger = BlockLedger()
    for at in range(8):
        ledger.adopt(0, [(at * SMALLEST, SMALLEST)])
        ledger.fill(0, [(at * SMALLEST, SMALLEST)])
        ledger.deliver([at * SMALLEST])
    for at in range(3):
        ledger.release(at * SMALLEST)
    assert ledger.trim(3) == []
    assert ledger.trim(2) == [(0, SMALLEST)]


def test_a_trimmed_block_is_a_range_for_the_worker_that_made_it() -> None:
    ledger = kept_batches(4)
    trimmed = tuple(ledger.trim(2))
    assert trimmed == ((0, SMALLEST), (SMALLEST, SMALLEST))
    assert len(ledger) == 2
    assert ledger.space(1) == ()
    assert ledger.space(0) == trimmed
    assert ledger.space(0) == ()
    ledger.adopt(0, [(0, 2 * SMALLEST)])
    ledger.check()
    with pytest.raises(InvalidTransition, match="no block"):
        ledger.release(SMALLEST)


def test_a_range_goes_to_the_maker_and_not_to_the_last_writer() -> None:
    ledger = BlockLedger()
    for worker in (0, 1):
        ledger.adopt(worker, [(worker * REGION, SMALLEST)])
        ledger.fill(worker, [(worker * REGION, 10)])
        ledger.drop(worker * REGION)
    granted = [ledger.grant(worker)[0][0] for worker in (0, 1)]
    assert [offset for offset, _ in granted] == [REGION, 0]
    for worker, (offset, _) in enumerate(granted):
        ledger.give_back(worker, [offset])
    assert len(ledger.trim(0)) == 2
    assert ledger.space(0) == ((0, SMALLEST),)
    assert ledger.space(1) == ((REGION, SMALLEST),)


def test_after_its_block_was_trimmed_a_batch_has_nothing_to_promise() -> None:
    ledger = BlockLedger()
    ledger.adopt(0, [(0, 2 * SMALLEST), (REGION // 2, SMALLEST)])
    ledger.fill(0, [(0, 2 * SMALLEST)])
    ledger.deliver([0])
    ledger.release(0)
    assert ledger.trim(0) == [(0, 2 * SMALLEST)]
    assert ledger.grant(0) == ((), ())
    ledger.check()


# ---- tasks for anyone, and workers in a dead one's place ------------------------------------------------


@pytest.mark.parametrize("state", [GRANTED, PROMISED])
def test_blocks_of_a_task_for_anyone_are_handed_over_to_who_claimed_it(state: str) -> None:
    ledger = block_in(FREE if state == GRANTED else HELD)
    ledger.adopt(0, [(REGION, SMALLEST)])
    ledger.fill(0, [(REGION, 10)])  # so that a batch's needs are known
    (block,) = (blocks := ledger.grant(-7))[0] + blocks[1]
    assert ledger.states()[0] == state
    with pytest.raises(InvalidTransition, match="0, which -7 holds"):
        ledger.give_back(1, [0])
    ledger.hand_over(-7, 1, (block,))
    assert ledger.states()[0] == state
    with pytest.raises(InvalidTransition, match="0, which 1 holds"):
        ledger.give_back(-7, [0])
    ledger.writer_dead(1)
    assert ledger.states()[0] == BLOCK_TRANSITIONS[state]["writer_dead"]
    ledger.check()


@pytest.mark.parametrize("state", list(BLOCK_TRANSITIONS))
def test_only_what_was_granted_to_its_holder_is_handed_over(state: str) -> None:
    ledger = block_in(state)
    with pytest.raises(InvalidTransition, match="not 1's to hand over"):
        ledger.hand_over(1, 2, ((0, SMALLEST),))
    if state not in (GRANTED, PROMISED):
        with pytest.raises(InvalidTransition, match=f"block 0 is {state}"):
            ledger.hand_over(0, 2, ((0, SMALLEST),))


def test_a_new_worker_makes_blocks_where_none_of_the_dead_one_lie() -> None:
    ledger = BlockLedger()
    first = 3 * SMALLEST
    ledger.adopt(1, [(REGION + first, SMALLEST), (REGION + first + SMALLEST, 2 * SMALLEST)])
    ledger.adopt(0, [(0, SMALLEST)])
    assert ledger.forget_space(1, REGION, 2 * REGION) == (
        (REGION, first),
        (REGION + first + 3 * SMALLEST, REGION - first - 3 * SMALLEST),
    )
    assert ledger.forget_space(0, 0, REGION) == ((SMALLEST, REGION - SMALLEST),)
    assert ledger.forget_space(2, 2 * REGION, 3 * REGION) == ((2 * REGION, REGION),)


def test_a_part_that_is_full_of_blocks_has_no_space() -> None:
    ledger = block_in(HELD)
    assert ledger.forget_space(0, 0, SMALLEST) == ()


def test_what_a_dead_worker_would_have_got_back_is_part_of_its_successors_space() -> None:
    ledger = kept_batches(2)
    assert ledger.trim(1) == [(0, SMALLEST)]
    assert ledger.forget_space(0, 0, REGION) == ((0, SMALLEST), (2 * SMALLEST, REGION - 2 * SMALLEST))
    assert ledger.space(0) == ()


def test_the_bytes_of_a_batch_fade_slowly_from_their_maximum() -> None:
    ledger = BlockLedger()
    assert ledger.batch_bytes == 0
    ledger.adopt(0, [(0, 4 * SMALLEST), (4 * SMALLEST, SMALLEST)])
    ledger.fill(0, [(0, 4 * SMALLEST)])
    assert ledger.batch_bytes == 4 * SMALLEST
    ledger.fill(0, [(4 * SMALLEST, 10)])
    assert SMALLEST < ledger.batch_bytes < 4 * SMALLEST


def test_what_a_worker_keeps_is_not_spare_and_leaves_the_others_where_they_are() -> None:
    ledger = BlockLedger()
    ledger.adopt(0, [(0, SMALLEST), (SMALLEST, SMALLEST), (2 * SMALLEST, SMALLEST)])
    ledger.fill(0, [(0, SMALLEST)], given=((0, SMALLEST), (SMALLEST, SMALLEST), (2 * SMALLEST, SMALLEST)))
    ledger.drop(0)
    assert ledger.trim(1) == []
    ledger.check()
    ledger.give_back(0, [SMALLEST])  # user code has let it go
    ledger.check()
    assert ledger.trim(1) == [(0, SMALLEST)]
    ledger.writer_dead(0)
    ledger.check()
    assert ledger.trim(1) == [(SMALLEST, SMALLEST)]


# ---- what is not used any more ----------------------------------------------------------------------


def batch(ledger: BlockLedger, *needs: int) -> None:
    """A task comes and goes, and uses what it was granted as far as it fits; new blocks else."""
    granted = dict(chain(*ledger.grant(0)))
    used, fresh = [], []
    for need in needs:
        fitting = [(size, o) for o, size in granted.items() if need <= size <= 2 * size_class(need)]
        if fitting:
            _, offset = min(fitting)  # as a worker does
            del granted[offset]
        else:
            offset = max([o + known.size for o, known in ledger._blocks.items()], default=0)
            offset = max([offset, *[o + size for o, size in fresh]])
            fresh.append((offset, size_class(need)))
        used.append((offset, need))
    ledger.adopt(0, fresh)
    ledger.give_back(0, list(granted))
    ledger.fill(0, used)
    for offset, _ in used:
        ledger.drop(offset)
    ledger.check()


SIZES_OF_BATCHES = st.lists(st.sampled_from((70_000, 100_000, 1 << 20, 10 << 20)), max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.lists(SIZES_OF_BATCHES, min_size=1, max_size=6), SIZES_OF_BATCHES)
def test_blocks_go_back_when_no_batch_uses_them_any_more(before: list[list[int]], after: list[int]) -> None:
    ledger = BlockLedger()
    for needs in before * 3:
        batch(ledger, *needs)
    for _ in range(2 * PATIENT + PATIENT // 8 + 2):
        batch(ledger, *after)
        ledger.trim(3)
    assert ledger.nbytes <= 2 * sum(map(size_class, after))
    assert serves(ledger.wanted, tuple(map(size_class, after)))
    if not after:
        assert ledger.batch_bytes == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(SIZES_OF_BATCHES, min_size=1, max_size=KINDS, unique_by=tuple), st.randoms())
def test_batches_of_a_few_kinds_in_any_order_keep_their_blocks(kinds: list[list[int]], rng: Random) -> None:
    ledger = BlockLedger()
    for needs in kinds * 2:
        batch(ledger, *needs)
        ledger.trim(3)
    grown = ledger.grown
    for _ in range(10):
        for needs in rng.sample(kinds, len(kinds)):
            batch(ledger, *needs)
            ledger.trim(3)
    assert ledger.grown == grown


def test_a_kind_that_is_not_seen_any_more_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = BlockLedger()
    for kind in range(KINDS + 3):
        batch(ledger, SMALLEST << 2 * kind)
    assert len(ledger.wanted) == KINDS
    assert ledger.wanted[-1] == SMALLEST << 6


# ---- everything at once -----------------------------------------------------------------------------


@dataclass
class Known:
    """What the model knows of a block."""

    size: int
    state: str = GRANTED
    writer: int | None = None
    home: int | None = None
    used: int = 0


def serves(sizes: tuple[int, ...], kind: tuple[int, ...]) -> bool:
    """Whether each block of a batch finds one of its own that fits."""
    left = sorted(sizes)
    for need in sorted(kind):
        fitting = [size for size in left if need <= size <= 2 * need]
        if not fitting:
            return False
        left.remove(fitting[0])
    return True


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of blocks. The model does not know how the ledger picks a block, only what it may pick."""

    @initialize()
    def start(self) -> None:
        self.ledger = BlockLedger()
        self.model: dict[int, Known] = {}
        self.ends = [worker * REGION for worker in range(WORKERS)]
        self.space: list[list[tuple[int, int]]] = [[] for _ in range(WORKERS)]
        self.grown = 0
        self.last: list[int] = []  # bytes that the last batch needed
        self.kinds: dict[tuple[int, ...], int] = {}  # sizes of a batch's blocks → tasks so far
        self.tasks = 0
        self.newest: list[int] = []  # blocks of the batch that was delivered last
        self.largest = 0.0  # bytes of a batch's blocks, the maximum so far

    def pick(self, data: st.DataObject, *states: str) -> int:
        return data.draw(st.sampled_from([o for o, known in self.model.items() if known.state in states]))

    def some(self, *states: str) -> bool:
        return any(known.state in states for known in self.model.values())

    @rule(worker=st.integers(0, WORKERS - 1), needs=st.lists(st.integers(1, 1 << 20), max_size=3))
    def adopt(self, worker: int, needs: list[int]) -> None:
        fresh = []
        for need in needs:
            size = size_class(need)
            fresh.append((self.ends[worker], size))
            self.model[self.ends[worker]] = Known(size, GRANTED, worker, worker, self.tasks)
            self.ends[worker] += size
        self.ledger.adopt(worker, fresh)
        self.grown += len(fresh)

    @rule(worker=st.integers(-2, WORKERS - 1))
    def grant(self, worker: int) -> None:
        """To a worker, or to a task that is still to find one."""
        granted, promised = self.ledger.grant(worker)
        offsets = [offset for offset, _ in granted + promised]
        self.tasks += 1
        assert len(offsets) <= len(self.ledger.wanted)
        assert len(set(offsets)) == len(offsets), "one block granted twice"
        wanted = self.ledger.wanted
        for blocks, before, after in ((granted, FREE, GRANTED), (promised, HELD, PROMISED)):
            for offset, size in blocks:
                known = self.model[offset]
                assert known.state == before, "a block in use was granted"
                assert known.size == size
                assert any(want <= size <= 2 * want for want in wanted), "a block too small, or too large"
                known.state, known.writer = after, worker
        assert {offset for offset, _ in promised} <= set(self.newest)
        if not granted:
            free = [known.size for known in self.model.values() if known.state == FREE]
            assert not [size for size in free if any(want <= size <= 2 * want for want in wanted)]

    @precondition(lambda self: self.some(GRANTED))
    @rule(data=st.data(), number=st.integers(1, 3))
    def fill(self, data: st.DataObject, number: int) -> None:
        worker = self.model[self.pick(data, GRANTED)].writer
        assert worker is not None
        mine = [o for o, k in self.model.items() if k.state == GRANTED and k.writer == worker][:number]
        used = [(offset, data.draw(st.integers(1, self.model[offset].size))) for offset in mine]
        given = data.draw(st.lists(st.sampled_from(list(self.model)), max_size=3))
        self.ledger.fill(worker, used, tuple((offset, self.model[offset].size) for offset in given))
        for offset, _ in used:
            self.model[offset].state = FILLED
            self.model[offset].used = self.tasks
        self.last = [need for _, need in used]
        self.largest = max(self.largest, float(sum(map(size_class, self.last))))
        kind = tuple(sorted(map(size_class, self.last)))
        self.kinds.pop(kind, None)
        self.kinds[kind] = self.tasks

    @precondition(lambda self: self.some(GRANTED, PROMISED))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        known = self.model[offset := self.pick(data, GRANTED, PROMISED)]
        assert known.writer is not None
        self.ledger.give_back(known.writer, [offset])
        known.state = FREE if known.state == GRANTED else HELD

    @precondition(lambda self: self.some(FILLED))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        filled = [offset for offset, known in self.model.items() if known.state == FILLED]
        self.newest = data.draw(st.lists(st.sampled_from(filled), unique=True, max_size=3))
        self.ledger.deliver(list(self.newest))
        for offset in self.newest:
            self.model[offset].state = HELD

    @precondition(lambda self: self.some(FILLED))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        offset = self.pick(data, FILLED)
        self.ledger.drop(offset)
        self.model[offset].state = FREE

    @precondition(lambda self: self.some(HELD, PROMISED))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known = self.model[offset := self.pick(data, HELD, PROMISED)]
        self.ledger.release(offset)
        known.state = FREE if known.state == HELD else GRANTED
        known.used = self.tasks

    @rule(worker=st.integers(0, WORKERS - 1))
    def writer_dead(self, worker: int) -> None:
        self.ledger.writer_dead(worker)
        for known in self.model.values():
            if known.state in (GRANTED, PROMISED) and known.writer == worker:
                known.state = FREE if known.state == GRANTED else HELD

    @rule(batches=st.integers(0, 3))
    def trim(self, batches: int) -> None:
        before = self.not_held()
        trimmed = self.ledger.trim(batches)
        # An upper bound: the ledger's maximum fades.
        needed = batches * max(self.largest, float(sum(self.ledger.wanted)))
        cold = 0
        for offset, size in trimmed:
            known = self.model.pop(offset)
            assert known.state == FREE, "a block in use was trimmed"
            assert known.size == size
            assert known.home is not None
            self.space[known.home].append((offset, size))
            cold += size if known.used < self.tasks - PATIENT else 0
        after = self.not_held()
        assert after == before - sum(size for _, size in trimmed)
        newest = float(sum(map(size_class, self.last))) if self.ledger.wanted else 0
        assert not trimmed or after + cold >= batches * newest - 1, "less is kept than the last batches need"
        for known in self.model.values():
            if known.state == FREE:
                assert after - known.size < needed, "a spare block was kept"

    @precondition(lambda self: any((known.writer or 0) < 0 for known in self.model.values()))
    @rule(worker=st.integers(0, WORKERS - 1), holder=st.integers(-2, -1))
    def hand_over(self, worker: int, holder: int) -> None:
        """A task found its worker."""
        mine = [o for o, k in self.model.items() if k.state in (GRANTED, PROMISED) and k.writer == holder]
        self.ledger.hand_over(holder, worker, tuple((offset, self.model[offset].size) for offset in mine))
        for offset in mine:
            self.model[offset].writer = worker

    @rule(worker=st.integers(0, WORKERS - 1))
    def replace(self, worker: int) -> None:
        """A new worker in a dead one's place may make blocks wherever none lies."""
        self.writer_dead(worker)
        start, end = worker * REGION, (worker + 1) * REGION
        spans = sorted((offset, known.size) for offset, known in self.model.items() if start <= offset < end)
        spans += self.ledger.forget_space(worker, start, end)
        at = start
        for offset, size in sorted(spans):
            assert offset == at, "space overlaps a block, or some was forgotten"
            at += size
        assert at == end
        self.space[worker] = []

    @rule(worker=st.integers(0, WORKERS - 1))
    def hand_back_space(self, worker: int) -> None:
        space = self.ledger.space(worker)
        assert sorted(space) == sorted(self.space[worker])
        self.space[worker] = []
        for offset, size in space:  # the worker makes the same blocks again
            self.ledger.adopt(worker, [(offset, size)])
            self.model[offset] = Known(size, GRANTED, worker, worker, self.tasks)
            self.grown += 1

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), event=st.sampled_from(list(EVENTS)))
    def what_the_table_lacks(self, data: st.DataObject, event: str) -> None:
        offset = data.draw(st.sampled_from(list(self.model)))
        known = self.model[offset]
        events = BLOCK_TRANSITIONS[known.state]
        if event not in events and not (
            event in ("return", "decline") and {"return", "decline"} & set(events)
        ):
            with pytest.raises(InvalidTransition):
                EVENTS[event](self.ledger, offset)

    def not_held(self) -> int:
        return sum(known.size for known in self.model.values() if known.state not in LOOKED_AT)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        model = self.model
        assert self.ledger.states() == {offset: known.state for offset, known in model.items()}
        assert len(self.ledger) == len(model)
        assert self.ledger.grown == self.grown
        assert self.ledger.free_blocks == sum(known.state == FREE for known in model.values())
        assert self.ledger.nbytes == sum(known.size for known in model.values())
        held = sorted((offset, known.size) for offset, known in model.items() if known.state in LOOKED_AT)
        assert sorted(self.ledger.held()) == held
        for kind, task in list(self.kinds.items())[-KINDS:]:
            if task >= self.tasks - PATIENT:
                assert serves(self.ledger.wanted, kind), "a kind of batch is not served"


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(deadline=None, max_examples=80, stateful_step_count=50)
