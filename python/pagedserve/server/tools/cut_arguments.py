"""Arguments of tool calls that were cut off.

``values`` does not define this, since the options of the server import it without pydantic.
"""

import json

from pydantic_core import from_json

from pagedserve.server.tools.values import DECODER


def completed(arguments: str) -> str:
    """JSON of the arguments of a call: unchanged, or what has arrived of those that were cut off.

    It is an object in any case, as chat templates and the Messages API expect.
    """
    if _is_object(arguments):
        return arguments
    try:
        found = from_json(arguments or "{}", allow_partial=True)
        if isinstance(found, dict):
            return json.dumps(found, allow_nan=False)
    except ValueError:
        pass
    return json.dumps({"arguments": arguments})


def _is_object(text: str) -> bool:
    try:
        return isinstance(DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False
