"""The module `time`, whose functions a program cannot replace.

Runs in every process. Tests freeze the clock (freezegun), and what this package measures and waits for is the
system's own, so the core imports `time` from here. It is a copy of the module, with functions of its own:
freezegun replaces the functions of `time` in every loaded module that has imported them.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import time as time
else:
    _spec = find_spec("time")
    time = module_from_spec(_spec)
    _spec.loader.exec_module(time)
