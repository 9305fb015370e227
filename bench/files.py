"""Results as a JSON file, written and read again."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from bench.results import VERSION, Results


def write(path: Path, results: Results) -> None:
    path.write_text(json.dumps(asdict(results), indent=1) + "\n")


def read(path: Path) -> Results:
    """The results in a file.

    Raises:
        ValueError: it is no file of results, or one of another version.
    """
    content = json.loads(path.read_text())
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(f"{path} holds results of version {version}, this bench reads version {VERSION}")
    try:
        results = _restored(Results, content)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} holds no results: {error}") from error
    assert isinstance(results, Results)
    return results


def _restored(kind: Any, value: Any) -> Any:
    """The value that `asdict` and JSON made of something of that type."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is types.UnionType:
        return None if value is None else _restored(arguments[0], value)
    if typing.get_origin(kind) is list:
        return [_restored(arguments[0], item) for item in value]
    if typing.get_origin(kind) is dict:
        return {key: _restored(arguments[1], item) for key, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        # An older file lacks what was not measured then; where that has no default it is no file of ours.
        return kind(
            **{
                part.name: _restored(hints[part.name], value[part.name])
                for part in fields(kind)
                if part.name in value
            }
        )
    return value
