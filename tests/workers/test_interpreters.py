"""The interpreters of a process: one owner, and a count of users. Copies of this process stand for them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from fastq_loader.system.calls import readable
from fastq_loader.workers.interpreters import Interpreters
from fastq_loader.workers.zygote import Zygote, copy_of_consumer
from tests.conftest import process_table
from tests.support.thorough import is_thorough
from tests.workers.test_zygote import FORK, forked, make

pytestmark = pytest.mark.processes


def quick() -> Zygote:
    """Stands for an interpreter, which takes seconds to start."""
    return copy_of_consumer(FORK, lambda arguments: make(*arguments), "/nowhere")


def answers(one: Zygote) -> bool:
    child = forked(one, 7)
    child.process.join(10)
    code = child.process.exitcode
    child.release()
    return code == 7


def has_ended(one: Zygote) -> bool:
    return one._child.pid not in {entry.pid for entry in process_table() if not entry.zombie}


def test_one_ends_with_its_last_user_and_a_dead_one_is_given_to_nobody() -> None:
    interpreters = Interpreters()
    first = interpreters.take("key", quick)
    assert interpreters.take("key", quick) is first
    other = interpreters.take("another key", quick)
    interpreters.give_back(first)
    assert answers(first)
    interpreters.give_back(first)
    assert has_ended(first)
    second = interpreters.take("key", quick)
    os.kill(second._child.pid, signal.SIGKILL)
    assert readable([second._child.descriptor], 5)
    third = interpreters.take("key", quick)
    assert answers(third)
    interpreters.give_back(second)
    assert interpreters.take("key", quick) is third, "a user of the dead one does not end its successor"
    for one in (third, third, other):
        interpreters.give_back(one)
    assert has_ended(third)
    assert has_ended(other)
    assert not interpreters.running


def test_what_the_collector_gives_back_in_the_middle_of_a_start_ends_after_it() -> None:
    """Also the one that was about to be taken."""
    interpreters = Interpreters()
    other, first = interpreters.take("another key", quick), interpreters.take("key", quick)

    class Collects(dict[Any, Zygote]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            interpreters.give_back(first)
            return found

    interpreters.running = Collects(interpreters.running)

    def start() -> Zygote:
        interpreters.give_back(other)
        return quick()

    second = interpreters.take("key", start)
    assert second is not first
    assert has_ended(first)
    assert has_ended(other)
    assert answers(second)
    interpreters.give_back(second)


def test_an_end_is_over_before_the_next_start_and_whoever_comes_meanwhile_gets_one_that_answers() -> None:
    """As loaders do that begin, on any thread, while the last one's workers end."""
    interpreters, started, wrong = Interpreters(), list[Zygote](), list[BaseException]()
    pauses = random.Random(1)

    def start() -> Zygote:
        assert all(map(has_ended, started[-1:]))
        started.append(quick())
        return started[-1]

    def use() -> None:
        try:
            for _ in range(150 if is_thorough else 20):
                one = interpreters.take("key", start)
                assert answers(one)
                interpreters.give_back(one)
                time.sleep(pauses.random() * 0.02)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not interpreters.running
