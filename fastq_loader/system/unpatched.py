"""Modules of the system whose functions a program cannot replace: `time`, `os` and `select`.

Runs in every process. Tests freeze the clock or count process ids (freezegun, mock), and libraries take
`poll` away (eventlet). What this package measures, waits for and signals is the system's own, so the core
imports these modules from here. They are copies, made at the first import. freezegun replaces a function
wherever a loaded module has it, so that a name alone would not do; modules written in C are made anew.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os as os
    import select as select
    import time as time
else:

    def _made_anew(name: str) -> Any:
        spec = find_spec(name)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    os = ModuleType("os")
    vars(os).update(vars(import_module("os")))
    select, time = _made_anew("select"), _made_anew("time")
