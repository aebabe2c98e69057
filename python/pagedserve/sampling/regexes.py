r"""ASCII meaning of ``\d``, ``\w`` and ``\s``, as in JSON Schema and other engines.

To llguidance they mean the classes of Unicode, digits and letters of every script; an expression
selects these with the prefix ``(?u)``.
"""

import re
from typing import Final

UNICODE_PREFIX: Final = "(?u)"
# Classes may be nested in classes, so each replaces its escape anywhere.
_ASCII: Final = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[ \t\n\r\f\v]",
    r"\S": r"[^ \t\n\r\f\v]",
}
_ESCAPE: Final = re.compile(r"\\.", re.DOTALL)


def ascii_classes(pattern: str) -> str:
    """Convert the classes of a regular expression to ASCII, unless it starts with ``(?u)``."""
    if pattern.startswith(UNICODE_PREFIX):
        return pattern
    return _ESCAPE.sub(lambda found: _ASCII.get(found[0], found[0]), pattern)
