"""`tune` and its search: what is measured, for how long, what wins, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader, Dynamic, ToDevice, Tuning, tune
from fastq_loader.extras.insight import machine
from fastq_loader.extras.insight.chooser import Limits, most_workers, numbers
from fastq_loader.extras.insight.model import Costs, Setting, seconds_per_batch
from fastq_loader.extras.tools import trials, tuning
from fastq_loader.extras.tools.trials import Measured
from fastq_loader.extras.tools.tuning import Search
from tests.support.datasets import Made, Stream
from tests.support.thorough import examples

OWN = Setting(2, 2)
EIGHT = Made(float, 8)


def decoding(load: float = 0.05, **others: float) -> Costs:
    return Costs((load,), pack=0.0001, overhead=0.0001, **others)


@dataclass
class Machine:
    """Measures what the model says, or what is told otherwise, and takes its time."""

    costs: Costs
    cpus: float = 8.0
    slower: dict[int, float] = field(default_factory=dict)  # workers → how much slower than the model
    overhead: float = 0.1
    worker_bytes: float = 0.0
    now: float = 0.0
    fails: dict[Setting, Exception] = field(default_factory=dict)
    calls: list[tuple[Setting, float, float]] = field(default_factory=list)
    interrupts: int = -1  # at which call

    def rate(self, setting: Setting) -> float:
        slower = self.slower.get(setting.num_workers, 1.0)
        return 1 / (seconds_per_batch(self.costs, setting, self.cpus) * slower)

    def measure(self, setting: Setting, seconds: float, patience: float) -> Measured:
        if len(self.calls) == self.interrupts:
            raise KeyboardInterrupt
        self.calls.append((setting, seconds, patience))
        self.now += seconds + self.overhead
        if setting in self.fails:
            raise self.fails[setting]
        batches = self.rate(setting) * seconds
        return Measured(batches, seconds, self.costs, self.worker_bytes)

    def search(self, own: Setting = OWN, seconds: float = 30.0, **limits: Any) -> Search:
        allowed: dict[str, Any] = {"cpus": self.cpus, "schedules": (False, True), "prefetch": (2, 4, 8)}
        return Search(Limits(own, **allowed | limits), self.measure, lambda: self.now, seconds)

    def found(self, *arguments: Any, **named: Any) -> Search:
        search = self.search(*arguments, **named)
        search.run()
        return search

    def best(self, *arguments: Any, **named: Any) -> Setting:
        best = self.found(*arguments, **named).best
        assert best is not None
        return best.setting


@examples(30)
@given(
    load=st.floats(1e-5, 2.0),
    step=st.sampled_from([0.0, 0.001, 0.2]),
    load_cpu=st.sampled_from([0.02, 0.5, 1.0]),
    cpus=st.sampled_from([1.0, 2.0, 3.5, 16.0]),
    tail=st.sampled_from([1.0, 20.0]),
    seconds=st.sampled_from([30.0, 120.0]),
    overhead=st.sampled_from([0.05, 2.0]),
)
def test_the_time_is_kept_and_what_wins_is_near_the_best(
    load: float, step: float, load_cpu: float, cpus: float, tail: float, seconds: float, overhead: float
) -> None:
    costs = replace(decoding(load, load_cpu=load_cpu, step=step), loads=(*[load] * 19, load * tail))
    played = Machine(costs, cpus, overhead=overhead)
    best = played.best(seconds=seconds)
    # One measurement more may have begun, and a slice has a least length.
    assert played.now <= seconds * 1.5 + 3 * overhead
    possible = [
        Setting(workers, prefetch, dynamic)
        for workers in [0, *numbers(most_workers(costs, cpus), cpus)]
        for prefetch in (1, 2, 4, 8)
        for dynamic in (False, True)
    ]
    assert played.rate(best) >= max(map(played.rate, possible)) * 0.9


@pytest.mark.parametrize(
    ("costs", "cpus", "own", "best"),
    [
        (decoding(0.05, step=0.2), 8, Setting(8, 2), Setting(1, 2)),  # of equals the cheapest
        (Costs((0.00005,), pack=0.00005, overhead=0.0002), 2, Setting(4, 2), Setting(0, 2)),
        (decoding(), 8, Setting(2, 2), Setting(8, 2)),
        (decoding(), 8, Setting(2, 2, True), Setting(8, 2, True)),  # the schedule stays
        (replace(decoding(), loads=(*[0.01] * 19, 0.5)), 4, Setting(2, 2), Setting(4, 2, True)),
    ],
)
def test_what_wins(costs: Costs, cpus: float, own: Setting, best: Setting) -> None:
    assert Machine(costs, cpus).best(own) == best


def test_a_short_search_does_not_recommend_what_is_slower_than_its_table() -> None:
    search = Machine(decoding(), 4.0, {2: 4.0, 4: 4.0}, overhead=1.0).found(seconds=3.0)
    assert len({row.setting.num_workers for row in search.rows.values() if row.rate}) == 3
    assert search.best is search.rows[Setting(1, 2)]
    assert search.best.rate == pytest.approx(max(row.rate for row in search.rows.values()))


def tried(search: Search) -> set[Setting]:
    return {row.setting for row in search.rows.values()}


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_workers_are_tried_than_are_allowed(most: int) -> None:
    found = Machine(decoding()).found(Setting(0, 2), most_workers=most)
    assert max(setting.num_workers for setting in tried(found)) == most
    assert Machine(decoding()).best(Setting(8, 2), most_workers=most).num_workers <= most, "nor recommended"


def test_the_spread_is_half_of_the_range_of_the_rates() -> None:
    row = tuning.Row(Setting(1), slices=[Measured(8.0, 1.0), Measured(12.0, 1.0), Measured(20.0, 2.0)])
    assert (row.rate, row.spread) == (10.0, 0.2)
    assert tuning.Row(Setting(1), slices=[Measured(8.0, 1.0)]).spread is None


def test_a_setting_that_fails_has_a_row_and_is_not_tried_again() -> None:
    error, eight = RuntimeError("no"), Setting(8, 2)
    played = Machine(decoding(), fails={eight: error})
    search = played.found()
    assert search.rows[eight].error is error
    assert [call[0] for call in played.calls].count(eight) == 1
    assert search.ranked()[0] is search.best is not search.rows[eight]
    assert search.ranked()[-1] is search.rows[eight]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Machine:
    played = Machine(decoding(), 4.0, overhead=0.0)

    def measure(loader: Any, setting: Setting, step: float, *times: float) -> Measured:
        played.costs = replace(played.costs, step=step)
        return played.measure(setting, *times)

    monkeypatch.setattr(trials, "measure", measure)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: played.now))
    monkeypatch.setattr(machine, "cpus", lambda: 4.0)
    return played


def loader_of(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(EIGHT, 2, **arguments)


def test_it_recommends_a_setting_with_a_table_and_a_loader_with_it(played: Machine) -> None:
    loader = loader_of(num_workers=1, shuffle=True)
    found = tune(loader, progress=False)
    assert found.settings == {"num_workers": 4, "prefetch_factor": 2, "schedule": "round_robin"}
    assert found.rows[0].settings == found.settings
    assert found.loader is not loader
    assert (found.loader.num_workers, found.loader.prefetch_factor) == (4, 2)
    assert found.loader.sampler is loader.sampler
    assert (loader.num_workers, loader.prefetch_factor) == (1, 2)
    assert [row.current for row in found.rows].count(True) == 1
    rates = [row.batches_per_second for row in found.rows[1:]]
    assert rates == sorted(rates, reverse=True)
    for row in found.rows:
        DataLoader(EIGHT, 2, **row.settings)
    assert max(map(len, str(found).splitlines())) <= 80
    head, rest, empty, names, first, *others = str(found).splitlines()
    assert head == "Recommended: num_workers=4, prefetch_factor=2, schedule='round_robin' (4 times"
    assert rest == "the current setting), without a step."
    assert empty == ""
    assert names.split()[:3] == ["workers", "prefetch", "schedule"]
    assert first.split()[:4] == ["→", "4", "2", "round_robin"]
    assert [line.startswith("now") for line in others].count(True) == 1
    assert "random numbers of the batches differ" in others[-1]
    assert found._repr_html_() == f"<pre>{str(found).replace(chr(39), '&#x27;')}</pre>"


def test_what_an_accelerator_does_is_said_to_be_left_out(played: Machine) -> None:
    device = ToDevice("cpu")
    object.__setattr__(device, "target", torch.device("cuda"))
    assert "Not measured: the copies to cuda" in str(tune(loader_of(device=device), progress=False))


def test_what_may_be_tried(played: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(machine, "local_ranks", lambda: 2)
    found = tuning.checked(loader_of(schedule=Dynamic(window=5)), None, 30, None, None, None)
    both = {"schedules": (False, True), "prefetch": (2, 4, 8), "machine_bytes": found.machine_bytes}
    assert found == Limits(Setting(0, 2, True), 4.0, 400.0, **both)
    loader = loader_of(num_workers=2, prefetch_factor=3, multiprocessing_context="spawn")
    found = tuning.checked(loader, None, 30, ["fork", "spawn"], ("dynamic",), 3)
    named = {"schedules": (True,), "start_methods": ("fork", "spawn")}
    own = Setting(2, 3, start_method="spawn")
    assert found == Limits(own, 4.0, 400.0, 3, **both | named)
    found = tuning.checked(DataLoader(Stream("tensors", [8])), None, 30, None, None, None)
    assert found.schedules == (False,)


def test_the_first_measurement_may_take_long(played: Machine) -> None:
    assert tune(loader_of(num_workers=1), seconds=1, progress=False).rows
    (_, _, first), (_, _, second), *_ = played.calls
    assert first == 60.0, "a busy machine has a result, too"
    assert second < 5.0


def test_an_interrupt_gives_what_was_measured(played: Machine) -> None:
    played.interrupts = 3
    found: Tuning = tune(loader_of(num_workers=1), progress=False)
    assert "It was interrupted" in str(found)
    assert len([row for row in found.rows if row.batches_per_second]) <= 3
    assert " - " in str(found), "what was not measured is not told to have failed"
    assert "failed" not in str(found)
    played.interrupts = len(played.calls)
    with pytest.raises(KeyboardInterrupt):  # nothing was measured before it
        tune(loader_of(num_workers=1), progress=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"seconds": "30"}, r"seconds='30' must be a number of seconds"),
        ({"step_seconds": -0.1}, r"step_seconds=-0.1 must be 0 seconds or more"),
        ({"max_workers": -1}, r"max_workers=-1 must be a number of workers, 0 or more, or None"),
        ({"start_methods": "fork"}, r"start_methods='fork' must be a collection.*\('fork',\)"),
        ({"start_methods": ["thread"]}, r"start_methods=\['thread'\] is not possible here: use some of fork"),
        ({"schedules": []}, r"schedules=\[\] is not possible here: use some of round_robin, dynamic"),
        (
            {"loader": DataLoader(Stream("tensors", [8])), "schedules": ["dynamic"]},
            r"schedules=\['dynamic'\] is not possible here: use some of round_robin",
        ),
        (
            {"loader": torch.utils.data.DataLoader(EIGHT)},
            "loader is a .*: tune needs a fastq_loader.DataLoader: change its import to `from fastq_",
        ),
    ],
)
def test_bad_arguments_are_named(played: Machine, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        tune(**{"loader": loader_of()} | arguments)
    assert not played.calls
