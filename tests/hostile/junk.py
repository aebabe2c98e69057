"""Random values that JSON can say, and sizes that are small mostly and large at times."""

from random import Random
from typing import Any, Final

_NUMBERS: Final[tuple[Any, ...]] = (
    0, -1, 1, 2, 7, 1e-320, 0.5, -0.0, 2**31, 2**53 + 1, -(2**63), 2**64, 10**30, 1e308, -1e19,
)  # fmt: skip
_TEXTS: Final = (
    "", "a", "\x00", "\n", "\ud800", "٣", "a" * 5000, "../../x", "<|end|>", "{{ 7*7 }}", "null",
    "</tool_call>", "%s%n", "\u202e\ufeff", "w1 w2",
)  # fmt: skip
_MAX_DEPTH: Final = 3


def size(rng: Random, most: int) -> int:
    """A number from 1 to ``most``, each order of magnitude as likely as another."""
    return int(most ** rng.random())


def number(rng: Random) -> Any:
    """A number that some check forgets."""
    if rng.random() < 0.3:
        return rng.choice((-1, 1)) * 10 ** rng.randrange(40)
    return rng.choice(_NUMBERS)


def text(rng: Random) -> str:
    """A text that some check forgets."""
    if rng.random() < 0.3:
        return "".join(chr(rng.randrange(0xD800)) for _ in range(rng.randrange(20)))
    return rng.choice(_TEXTS)


def value(rng: Random, depth: int = 0) -> Any:
    """Any value, with lists and objects in it."""
    kind = rng.randrange(8 if depth < _MAX_DEPTH else 6)
    if kind in (0, 1):
        return number(rng)
    if kind in (2, 3):
        return text(rng)
    if kind in (4, 5):
        return rng.choice((None, True, False, [], {}))
    if kind == 6:  # the last but one
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {text(rng): value(rng, depth + 1) for _ in range(rng.randrange(4))}
