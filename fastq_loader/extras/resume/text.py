"""States of random generators as text: JSON, with arrays in base64, of 4 to 7 kB for a Mersenne twister.

Pure, but for `fits`, which tries a state.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from fastq_loader.reading.generators import set_state, state_of


def dump(value: Any) -> str:
    """Convert a state, or any value made of dicts, tuples, arrays and plain values, to text."""
    return json.dumps(value, default=_json_safe)


def _json_safe(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "base64": base64.b64encode(value.tobytes()).decode()}
    return value.item()  # a numpy scalar


def load(text: str) -> Any:
    """Convert the text from `dump` back; lists become tuples."""
    return _as_it_was(json.loads(text, object_hook=_dict))


def _dict(value: dict[str, Any]) -> Any:
    if value.keys() == {"dtype", "base64"}:
        return np.frombuffer(base64.b64decode(value["base64"], validate=True), value["dtype"]).copy()
    return {name: _as_it_was(each) for name, each in value.items()}


def _as_it_was(value: Any) -> Any:
    """Convert lists back to tuples, which JSON writes as lists."""
    return tuple(map(_as_it_was, value)) if isinstance(value, list) else value


def fits(generator: Any, state: Any) -> str:
    """Why a generator refuses a state; "" if it accepts it. Tries the state, and restores the generator."""
    before = state_of(generator)
    try:
        set_state(generator, state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        set_state(generator, before)
    return ""
