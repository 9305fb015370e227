"""Results as rows: a file of JSON lines, each of which says in `row` what it is.

`run`: the first line, and one more for each time that a run was gone on with: `version` of the layout, the
`machine` with its versions and the date, the `revision` that was measured (a commit, and a digest of the
package's files), the command line's `arguments`.
What follows, up to the next such line, was measured so.

All others name the case: `kind` ("steady", "program", "starts", "against", "device",
"training"), `case` (the name of
the workload, program, shape of batches or training), `workers`, `start_method`.

`case`: what is known of it before any block (`description`, `batch_bytes`, ...).

`peer`: what is known of a contender beside its blocks: `label`, `notes`, and in `failure` why it has no
blocks. In the steady state percentiles of `next()` in seconds (`p50` ...).

`block`: one timed block: `peer`, `block` (of every peer block k ran in round k), `part` where a round has
several, `batches`, `seconds` of wall clock. `consumer_cpu` and `worker_cpu` are seconds of CPU, user and
system, of all threads; `switches` are context switches of both. `timing.device`,
`timing.training`, `timing.starts` and `programs.case` say what blocks of theirs have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

VERSION = 4
KEY = ("kind", "case", "workers", "start_method")
DIGITS = 9  # after the point: nanoseconds

Row = dict[str, Any]


@dataclass
class PeerRows:
    """What a case's rows say of one peer."""

    about: Row
    rows: list[Row] = field(default_factory=list)

    @property
    def label(self) -> str:
        return str(self.about["label"])

    @property
    def failure(self) -> str | None:
        return self.about.get("failure")

    def part(self, name: str = "") -> pd.DataFrame:
        """The blocks of one part, by their round; empty where there are none."""
        blocks = [row for row in self.rows if row["part"] == name]
        return pd.DataFrame(blocks).set_index("block") if blocks else pd.DataFrame()


@dataclass
class CaseRows:
    """What the rows say of one case; of every peer in the order of the report."""

    facts: Row
    peers: dict[str, PeerRows] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.facts[name] for name in KEY)

    @property
    def name(self) -> str:
        return str(self.facts["case"])

    def part(self, peer: str, name: str = "") -> pd.DataFrame:
        """The blocks of a peer, which need not be there."""
        return self.peers[peer].part(name) if peer in self.peers else pd.DataFrame()


class Results:
    """The runs that rows come from, and their cases."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.runs: list[Row] = []
        self._cases: dict[tuple[Any, ...], CaseRows] = {}
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row["row"] == "run":
                self.runs.append(row)
                continue
            key = tuple(row[name] for name in KEY)
            if row["row"] == "case":
                self._cases[key] = CaseRows(row)
            elif row["row"] == "peer":
                self._cases[key].peers[row["peer"]] = PeerRows(row)
            else:
                self._cases[key].peers[row["peer"]].rows.append(row)

    def __contains__(self, key: object) -> bool:
        return key in self._cases

    def cases(self, kind: str = "") -> list[CaseRows]:
        """In the order in which they were measured; all of them where no kind is named."""
        return [case for case in self._cases.values() if not kind or case.key[0] == kind]

    def by_workers(self) -> dict[tuple[int, str], list[CaseRows]]:
        """The cases of the steady state by their number of workers and how these are started."""
        found: dict[tuple[int, str], list[CaseRows]] = {}
        for case in self.cases("steady"):
            found.setdefault(case.key[2:], []).append(case)
        return found

    @property
    def machine(self) -> Row:
        """Where it was measured."""
        return dict(self.runs[0]["machine"])

    @property
    def caption(self) -> str:
        """The commit, the machine, the options and the days, in a line."""
        machine, given = self.machine, self.runs[0]["arguments"]
        first, last = (str(run["machine"]["date"])[:10] for run in (self.runs[0], self.runs[-1]))
        commits = dict.fromkeys(run["revision"]["commit"] for run in self.runs)
        blocks = " or ".join(str(given[each]) for each in ("blocks", "ties") if each in given)
        return (
            f"Commit {', '.join(commits)}, {machine['cpu']}, {machine['cores']} cores, "
            f"torch {machine['versions']['torch']}, {blocks} blocks of {given['seconds']:g} s each, "
            f"{first if first == last else f'{first} to {last}'}"
        )


def run_row(machine: Row, revision: Row, arguments: Row) -> Row:
    """The line that a run begins with."""
    return {
        "row": "run",
        "version": VERSION,
        "machine": machine,
        "revision": revision,
        "arguments": arguments,
    }


def append(path: Path, rows: Iterable[Row]) -> None:
    """Write rows behind those that a file has."""
    with path.open("a") as file:
        file.writelines(f"{json.dumps(_rounded(row), separators=(',', ':'))}\n" for row in rows)


def _rounded(row: Row) -> Any:
    return json.loads(json.dumps(row), parse_float=lambda text: round(float(text), DIGITS))


def read(path: Path) -> Results:
    """The results in a file; ValueError when it holds none, or of another version."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if (version := rows[0]["version"]) != VERSION:
            raise ValueError(f"version {version} of the layout, where this bench reads {VERSION}")
        return Results(rows)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{path} holds no results: {error!r}") from error
