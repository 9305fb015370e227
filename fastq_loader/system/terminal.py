"""Text for standard output, which may not have every character.

Runs in the consumer. All pages that this package shows come through here: what `print` gets from them can be
written, whatever names and errors of the user's they contain.
"""

from __future__ import annotations

import sys

_IN_ASCII = str.maketrans(
    {
        **dict(zip("×µ▁▂▃▄▅▆▇█▌▋▊▉", "xu_..--==#####", strict=True)),
        **dict.fromkeys("▏▎▍", ""),
        "→": "->",
        "…": "...",
        "±": "+-",
    }
)


def printable(text: str) -> str:
    """The text; if standard output cannot encode it, in ASCII, where characters without a likeness become
    escapes."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return text.translate(_IN_ASCII).encode("ascii", "backslashreplace").decode()
    return text
