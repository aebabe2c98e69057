"""The kinds of hostile requests: one list, which the stress walks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from tests.hostile import body_kinds, grammar_kinds, wire_kinds
from tests.hostile.client import CLOSED, Target, request

Attack: TypeAlias = Callable[[Target, Random], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that have one thing wrong with them.

    Attributes:
        name: As in the table.
        attack: Makes one of them; returns its status, or what else became of it.
        weight: How often it is drawn, beside the others.
        may_close: Whether the server may close the connection without an answer.
    """

    name: str
    attack: Attack
    weight: int = 10
    may_close: bool = False

    def is_fault(self, outcome: str) -> bool:
        """Whether a server in order never lets this become of a request."""
        if outcome == CLOSED:
            return not self.may_close
        return outcome not in _ALLOWED


# What a request may become: answered, refused for what it is, not supported, no place, left.
_ALLOWED: Final = frozenset(
    {"left", "501", "503"}
    | {
        "100",
        "200",
        "204",
        "307",
        "400",
        "401",
        "403",
        "404",
        "405",
        "408",
        "411",
        "413",
        "414",
        "415",
    }
    | {"416", "417", "422", "426", "429", "431", "505"}
)


def _sends(make: Callable[[Random], object]) -> Attack:
    """Send what ``make`` makes: the bytes of a request, or a path and a body."""

    async def attack(target: Target, rng: Random) -> str:
        made = make(rng)
        if isinstance(made, tuple):
            made = request(*made)
        assert isinstance(made, bytes)
        return await target.ask(made)

    return attack


KINDS: Final = (
    Kind("bounds of numbers", _sends(grammar_kinds.bounds)),
    Kind("constants", _sends(grammar_kinds.constants)),
    Kind("keywords", _sends(grammar_kinds.keywords)),
    Kind("references", _sends(grammar_kinds.references)),
    Kind("nested schemas", _sends(grammar_kinds.nested)),
    Kind("wide schemas", _sends(grammar_kinds.wide)),
    Kind("chains of rules", _sends(grammar_kinds.rule_chains)),
    Kind("odd grammars", _sends(grammar_kinds.odd_grammars)),
    Kind("regular expressions", _sends(grammar_kinds.regexes)),
    Kind("choices", _sends(grammar_kinds.choices), weight=3),
    Kind("contradictions", _sends(grammar_kinds.contradictions)),
    Kind("tools", _sends(grammar_kinds.tools)),
    Kind("earlier calls", _sends(grammar_kinds.earlier_calls)),
    Kind("long lists", _sends(body_kinds.long_lists), weight=3),
    Kind("long messages", _sends(body_kinds.long_messages), weight=3),
    Kind("long texts", _sends(body_kinds.long_texts), weight=3),
    Kind("long objects", _sends(body_kinds.long_objects), weight=3),
    Kind("wrong types", _sends(body_kinds.wrong_types), weight=60),
    Kind("extremes", _sends(body_kinds.extremes), weight=30),
    Kind("no JSON", _sends(body_kinds.no_json), weight=20),
    Kind("cut JSON", _sends(body_kinds.cut_json)),
    Kind("images", _sends(body_kinds.images), weight=5),
    Kind("forms", _sends(body_kinds.forms), weight=5),
    Kind("routes", _sends(body_kinds.routes), weight=20, may_close=True),
    Kind("adapters", body_kinds.adapters),
    Kind("exploding patterns", body_kinds.exploding_patterns, weight=1),
    Kind("aborts", _sends(body_kinds.aborts), weight=5),
    Kind("good requests", _sends(body_kinds.chatter), weight=20),
    Kind("big headers", wire_kinds.big_headers, weight=3, may_close=True),
    Kind("half-sent heads", wire_kinds.half_heads, weight=5, may_close=True),
    Kind("slow heads", wire_kinds.slow_heads, weight=3, may_close=True),
    Kind("unfinished bodies", wire_kinds.unfinished_bodies, weight=3, may_close=True),
    Kind("slow bodies", wire_kinds.slow_bodies, weight=5),
    Kind("odd framing", wire_kinds.odd_framing, weight=10, may_close=True),
    Kind("no HTTP", wire_kinds.no_http, weight=10, may_close=True),
    Kind("pipelined requests", wire_kinds.pipelined, weight=5, may_close=True),
    Kind("cut short", wire_kinds.cut_short, weight=10, may_close=True),
    Kind("vanishing clients", wire_kinds.vanishing, weight=10),
    Kind("slow readers", wire_kinds.slow_readers, weight=5),
    Kind("idle connections", wire_kinds.idle, weight=5),
)
