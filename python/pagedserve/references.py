"""References of JSON schemas: ``$ref`` within one document."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def resolved(reference: object, root: Any) -> Any:
    """Resolve a reference into a schema; None if its target does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    steps = unquote(reference[1:]).split("/")
    if steps[0]:  # a reference to an anchor
        return None
    for step in steps[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
