"""Where a text is in its grammar follows from its tokens alone."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pagedserve.sampling.grammar import Grammar, GrammarCompiler
from pagedserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from pagedserve import LLM

TEXT = '{"name": "Bob", "tags": ["x", "yz"]}'


@pytest.fixture
def compiler(smollm2: "LLM") -> GrammarCompiler:
    return smollm2.llm_engine.input_processor.grammars


@pytest.fixture
def grammar(compiler: GrammarCompiler) -> Grammar:
    return compiler.compile(StructuredOutputsParams(json_object=True))


def encoded(compiler: GrammarCompiler, text: str) -> list[int]:
    token_ids: list[int] = compiler.tokenizer(text, add_special_tokens=False).input_ids
    return token_ids


def tokens_of(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_masks_do_not_depend_on_what_was_asked_before(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    tokens = encoded(compiler, TEXT)
    prefixes = [tokens[:end] for end in range(len(tokens) + 1)]
    wanted = [grammar.states().allowed(prefix).mask for prefix in prefixes]
    states = grammar.states()
    # In order, each twice as after a step that failed; beams; back to the beginning.
    order = [place for place in range(len(prefixes)) for _ in range(2)] + [0, 5, 3, 4, 9, 1]
    for place in order:
        assert np.array_equal(states.allowed(prefixes[place]).mask, wanted[place])
    for place, token in enumerate(tokens):
        assert token in tokens_of(wanted[place])
    assert tokens_of(wanted[-1]) >= set(compiler.eos_token_ids)
    assert not tokens_of(wanted[0]) & set(compiler.eos_token_ids)


def test_states_are_forgotten_with_their_tokens(grammar: Grammar) -> None:
    states = grammar.states()
    tokens = [90, 198] + [198] * 40  # a brace and lines
    for end in range(len(tokens)):
        states.allowed(tokens[:end])
    assert len(states._by_tokens) <= 3


def test_tokens_that_the_grammar_does_not_allow_are_a_fault(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    allowed = grammar.states().allowed(encoded(compiler, "no object"))
    assert allowed.fault is not None
    assert "the grammar cannot go on" in allowed.fault
    assert not allowed.mask.any()


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first, second = (compiler.compile(StructuredOutputsParams(regex="a+b")) for _ in range(2))
    assert first is second
