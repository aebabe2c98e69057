"""Schemas at random, and random texts of the tokens that they allow, judged by ``jsonschema``."""

import json
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from pagedserve import RequestError
from pagedserve.sampling.grammar import compute_masks
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams
from tests.support.examples import examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 150
NAMES = ("a", "b", "name", "x y", "ä", 'q"', "0")
# What ends a part of a document, so that texts end.
CLOSING = ('"', "}", "]", "1", "0", '",', '"}', '"]', "null", "true", ",", ":", '":')


def schema(source: random.Random, depth: int = 0) -> Any:
    """A schema of most kinds that there are; some that nothing satisfies, or that are refused."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any"]
    if depth < 3:
        kinds += ["object", "array", "object", "array", "anyOf", "allOf", "oneOf", "tuple"]
    kind = source.choice(kinds)
    return MAKERS[kind](source, depth)


def string(source: random.Random, depth: int) -> Any:
    del depth
    made: dict[str, Any] = {"type": "string"}
    match source.randrange(6):
        case 0:
            made |= {"minLength": source.randrange(4), "maxLength": source.randrange(8)}
        case 1:
            made["pattern"] = source.choice(["^[a-z]{2,5}$", "^a|b+$", "[0-9]", r"^\d{3}-\w*$"])
        case 2:
            made["format"] = source.choice(["date", "time", "ipv4", "uuid", "email", "date-time"])
    return made


def number(source: random.Random, depth: int) -> Any:
    del depth
    made: dict[str, Any] = {"type": source.choice(["integer", "number"])}
    if source.random() < 0.5:
        made[source.choice(["minimum", "exclusiveMinimum"])] = source.randrange(-20, 30)
    if source.random() < 0.5:
        made[source.choice(["maximum", "exclusiveMaximum"])] = source.randrange(-5, 60)
    if source.random() < 0.2:
        made["multipleOf"] = source.choice([2, 5, 0.5])
    return made


def values(source: random.Random) -> list[Any]:
    known: list[Any] = [
        None,
        True,
        0,
        -7,
        2.5,
        "",
        "ä\n",
        "long text here",
        [],
        [1, "b"],
        {"k": {}},
    ]
    return source.sample(known, source.randrange(1, 4))


def made_object(source: random.Random, depth: int) -> Any:
    names = source.sample(NAMES, source.randrange(4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema(source, depth + 1) for name in names},
        "required": [name for name in names if source.random() < 0.6],
    }
    if source.random() < 0.7:
        made["additionalProperties"] = source.choice([False, False, True, {"type": "integer"}])
    if source.random() < 0.1:
        made["minProperties"] = source.randrange(3)
    if source.random() < 0.1:
        made["patternProperties"] = {"^p": schema(source, depth + 1)}
    return made


def array(source: random.Random, depth: int) -> Any:
    made: dict[str, Any] = {"type": "array", "items": schema(source, depth + 1)}
    if source.random() < 0.5:
        made |= {"minItems": source.randrange(3), "maxItems": source.randrange(1, 5)}
    if source.random() < 0.1:
        made["uniqueItems"] = True
    return made


def several(key: str) -> Any:
    def make(source: random.Random, depth: int) -> Any:
        return {key: [schema(source, depth + 1) for _ in range(source.randrange(1, 4))]}

    return make


def made_tuple(source: random.Random, depth: int) -> Any:
    parts = [schema(source, depth + 1) for _ in range(source.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": source.choice([False, True])}


MAKERS: dict[str, Any] = {
    "string": string,
    "integer": number,
    "number": number,
    "boolean": lambda *_: {"type": "boolean"},
    "null": lambda *_: {"type": ["null", "boolean"]},
    "enum": lambda source, _: {"enum": values(source)},
    "const": lambda source, _: {"const": values(source)[0]},
    "any": lambda source, _: source.choice([{}, True, {"not": {}}, {"type": "strange"}]),
    "object": made_object,
    "array": array,
    "tuple": made_tuple,
    **{key: several(key) for key in ("anyOf", "allOf", "oneOf")},
}


@pytest.fixture(scope="module")
def compiler(real_tokenizer: "PreTrainedTokenizerBase") -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(real_tokenizer, len(real_tokenizer), [real_tokenizer.eos_token_id])
    yield made
    made.end()


def walk(compiler: GrammarCompiler, wanted: Any, source: random.Random) -> str | None:
    """A text of tokens that may come, one after the other; None where it does not end."""
    states = compiler.compile(StructuredOutputsParams(json=wanted)).states(1)
    vocab = compiler.tokenizer.get_vocab()
    closing = [vocab[token] for token in CLOSING]
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        state = states.at(tokens)
        bits = np.unpackbits(compute_masks([state]).view(np.uint8), bitorder="little")
        assert state.fault is None
        may_come = np.flatnonzero(bits)
        assert may_come.size, "a text that was begun can go on"
        token: int
        ending = compiler.eos_token_ids[0]
        ends = [token for token in closing if bits[token]]
        if bits[ending] and source.random() < 0.7:
            token = ending
        elif ends and source.random() < 0.7:
            token = source.choice(ends)
        else:
            token = int(source.choice(may_come))
        if token in compiler.eos_token_ids:
            return str(compiler.tokenizer.decode(tokens))
        tokens.append(token)
    return None


def test_what_may_come_makes_documents_of_the_schema(compiler: GrammarCompiler) -> None:
    checker = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
    num_ended = num_refused = 0
    most = examples(100, all_of_them=3000)
    for seed in range(most):
        source = random.Random(seed)
        wanted = schema(source)
        try:
            text = walk(compiler, wanted, source)
        except RequestError as refused:
            num_refused += 1
            assert "structured_outputs.json cannot be used at #" in str(refused)  # noqa: PT017
            continue
        if text is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text), wanted, format_checker=checker)
    assert num_ended > most / 3
    assert num_refused > 0
