"""JSON documents of clients, in numbers that a response can repeat."""

import json
import math
import reprlib
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.server.http.bounds import MAX_DIGITS

# Bytes that are parsed in one hold of the interpreter's lock: up to 0.01 s.
_BYTES_AT_ONCE: Final = 1 << 17


def parsed(content: bytes) -> Any:
    """Parse a JSON document.

    Raises:
        RequestError: It is not UTF-8, or has a number that is not finite, or of too many digits.
            json.JSONDecodeError: It is not valid JSON.
    """
    parse_int = _integer if len(content) > _BYTES_AT_ONCE else None
    try:
        text = content.decode("utf-8-sig")
        return json.loads(text, parse_int=parse_int, parse_float=_real, parse_constant=_real)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is no UTF-8: {error.reason} at byte {error.start}") from error
    except (json.JSONDecodeError, RequestError):
        raise
    except ValueError as error:  # for an integer
        raise RequestError(f"a number of the body has more than {MAX_DIGITS} digits") from error


# One call per number lets other threads run between the millions of a body, whose numbers may have
# thousands of digits each; it takes twice the time.
def _integer(digits: str) -> int:
    return int(digits)


def _real(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):  # a response with it would be no JSON
        raise RequestError(f"the body has the number {reprlib.repr(written)}; it must be finite")
    return number
