"""Shares of a cluster, and who gives room to whom; all of it without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.remote.ranks import TURN, Board, Holding, gifts, share, used, waits_for
from tests.support.ray_store import Store
from tests.support.thorough import examples

AMOUNTS = st.floats(0.01, 4, allow_nan=False)
POOLS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.builds(Holding, st.integers(0, 4), st.integers(0, 5 * TURN)),
    min_size=1,
)


@examples(100)
@given(
    st.fixed_dictionaries({"CPU": st.integers(0, 64), "GPU": st.integers(0, 8)}),
    st.dictionaries(st.sampled_from(["CPU", "GPU", "decoder"]), AMOUNTS),
    st.integers(1, 16),
    st.integers(1, 64),
)
def test_the_shares_of_all_ranks_have_room_together(room: Any, takes: Any, ranks: int, workers: int) -> None:
    each = share(room, takes, ranks, workers)
    assert 1 <= each <= workers
    fits = {name: each * ranks * amount <= room.get(name, 0) + 1e-6 for name, amount in takes.items()}
    assert each == 1 or all(fits.values())
    one_more = [(each + 1) * ranks * amount > room.get(name, 0) - 1e-6 for name, amount in takes.items()]
    assert each == workers or any(one_more), "all that there is is used"


def test_parts_of_a_cpu_add_up() -> None:
    assert share({"CPU": 7.0}, {"CPU": 0.5}, 2, 99) == 7
    assert share({"CPU": 0.3}, {"CPU": 0.1}, 1, 99) == 3
    assert used({"CPU": 8.0, "GPU": 1.0}, {"CPU": 3.0}) == {"CPU": 5.0, "GPU": 1.0}


@examples(100)
@given(POOLS)
def test_each_pool_that_starves_is_given_one_in_each_turn_by_all_that_have_more_in_turn(pools: Any) -> None:
    starving = {name for name in pools if pools[name].workers == 0 and pools[name].waited >= TURN}
    rich = {name for name in pools if pools[name].workers > 1}
    for name in pools:
        due = gifts(pools, name)
        assert {pool for pool, _ in due} <= starving
        assert not due or name in rich
    for one in starving:
        givers = []
        for _ in rich:
            pools[one] = Holding(0, pools[one].waited + TURN)
            givers += [name for name in pools if any(pool == one for pool, _ in gifts(pools, name))]
        assert sorted(givers) == sorted(rich)


def test_the_richest_gives_first() -> None:
    pools = {"a": Holding(2, 0), "b": Holding(4, 0), "c": Holding(0, TURN), "d": Holding(1, 0)}
    assert gifts(pools, "b") == {("c", 1)}
    assert gifts(pools, "a") == gifts(pools, "d") == set()


@pytest.mark.parametrize(
    ("starting", "takes", "reason"),
    [
        (
            [None, "m", "n", "m"],
            {"CPU": 1, "decoder": 0.5},
            "workers that wait for a machine with room: 1 (each takes 1 CPU and 0.5 decoder; free in the "
            "cluster: 0.5 of 4 CPU, 0 of 0 decoder) and the dataset is still being opened on m, n",
        ),
        ([None], {}, "workers that wait for a machine with room: 1"),
        ([], {"CPU": 1}, "no worker is being started"),
    ],
)
def test_the_reason_of_a_wait_has_numbers(starting: Any, takes: Any, reason: str) -> None:
    assert waits_for(starting, takes, {"CPU": 4.0}, {"CPU": 0.5}) == reason


# ---- what the others have -------------------------------------------------------------------------------


def test_pools_of_a_job_see_each_other_and_no_others() -> None:
    store = Store()
    one, two, stranger = (
        Board(store, "10.0.0.1:5/2", "01"),
        Board(store, "10.0.0.1:5/2", "02"),
        Board(store, "10.0.0.1:55/2", "03"),
    )
    assert one.join({"CPU": 2.0}, ()) == {"CPU": 2.0}
    assert two.join({"CPU": 5.0}, ()) == {"CPU": 2.0}, "three of them are the first one's workers"
    assert stranger.join({"CPU": 6.0}, ()) == {"CPU": 6.0}
    mine, others = Holding(3, 0), Holding(2, 0)
    assert one.exchange(mine) == {one.name: mine}, "the other one is new"
    two.exchange(others)
    assert one.exchange(mine) == {one.name: mine, two.name: others}
    assert len(store.keys) == 3
    for board in (one, two, stranger):
        board.leave()
    assert not store.keys


def test_a_dead_pool_is_not_taken_for_one_that_starves() -> None:
    store = Store()
    one, dead = Board(store, "job", "01"), Board(store, "job", "02")
    for waited in (20, 21):
        dead.exchange(Holding(0, waited))
        one.exchange(Holding(2, 0))
    assert one.exchange(Holding(2, 0))[dead.name].starves, "time has passed there"
    dead.exchange(Holding(1, 0))
    one.exchange(Holding(2, 0))
    dead.exchange(Holding(0, 30))
    for _ in range(3):
        assert dead.name not in one.exchange(Holding(2, 0))


def test_entries_of_ended_programs_do_not_count_and_are_removed() -> None:
    store = Store()
    Board(store, "job", "01").join({"CPU": 0.0}, ())
    Board(store, "job", "02").join({"CPU": 5.0}, ())
    late = Board(store, "job", "03")
    assert late.join({"CPU": 4.0}, {"01", "99"}) == {"CPU": 0.0}, "as the second one saw it"
    assert sorted(key.split()[1][:2] for key in store.keys) == [b"02", b"03"]
    assert Board(store, "job", "04").join({"CPU": 4.0}, {"01", "02", "03"}) == {"CPU": 4.0}
    assert len(store.keys) == 1
