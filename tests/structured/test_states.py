"""Where a text is in its grammar follows from its tokens alone."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pagedserve.sampling.grammar import Grammar, GrammarStates, compute_masks
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from pagedserve import LLM

TEXT = '{"name": "Bob", "tags": ["x", "yz"]}'


@pytest.fixture
def compiler(smollm2: "LLM") -> GrammarCompiler:
    return smollm2.llm_engine.input_processor.grammars._compiler()


@pytest.fixture
def grammar(compiler: GrammarCompiler) -> Grammar:
    return compiler.compile(StructuredOutputsParams(json_object=True))


def encoded(compiler: GrammarCompiler, text: str) -> list[int]:
    token_ids: list[int] = compiler.tokenizer(text, add_special_tokens=False).input_ids
    return token_ids


def tokens_after(states: GrammarStates, token_ids: list[int]) -> set[int]:
    mask = compute_masks([states.at(token_ids)])
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("num_kept", [1, 2, 4])
def test_masks_do_not_depend_on_what_was_asked_before(
    compiler: GrammarCompiler, grammar: Grammar, num_kept: int
) -> None:
    tokens = encoded(compiler, TEXT)
    prefixes = [tokens[:end] for end in range(len(tokens) + 1)]
    wanted = [tokens_after(grammar.states(1), prefix) for prefix in prefixes]
    states = grammar.states(num_kept)
    # In order, each twice as after a step that failed; beams; back to the beginning.
    order = [place for place in range(len(prefixes)) for _ in range(2)] + [0, 5, 3, 4, 9, 1]
    for place in order:
        assert tokens_after(states, prefixes[place]) == wanted[place]
        # As when a step failed behind its choice, or another sequence chose otherwise.
        for token in (tokens[0], 90, 198, *tokens[place : place + 1]):
            assert states.at(prefixes[place]).admits(token) == (token in wanted[place])
    for place, token in enumerate(tokens):
        assert token in wanted[place]
    assert wanted[-1] >= set(compiler.eos_token_ids)
    assert not wanted[0] & set(compiler.eos_token_ids)


def test_the_states_of_a_step_are_there_until_its_end(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    tokens = encoded(compiler, TEXT)
    states = grammar.states(4)
    for first in range(len(tokens) - 2):
        # A token and two guesses behind it.
        found = [states.at(tokens[: first + more]) for more in range(3)]
        masks = compute_masks(found)
        for more, mask in enumerate(masks):
            again = compute_masks([grammar.states(1).at(tokens[: first + more])])
            assert np.array_equal(mask, again[0])


@pytest.mark.parametrize("text", ["", TEXT[:1], TEXT[:9], TEXT[:-1], TEXT])
def test_a_token_is_admitted_where_the_mask_has_it(
    compiler: GrammarCompiler, grammar: Grammar, text: str
) -> None:
    states = grammar.states(1)
    tokens = encoded(compiler, text)
    state = states.at(tokens)
    admitted = {token for token in range(compiler.vocab_size) if state.admits(token)}
    assert admitted == tokens_after(states, tokens)


def test_states_are_forgotten_with_their_tokens(grammar: Grammar) -> None:
    states = grammar.states(2)
    tokens = [90, 198] + [198] * 40  # a brace and lines
    for end in range(len(tokens)):
        states.at(tokens[:end])
    assert len(states._by_tokens) <= 2


def test_tokens_that_the_grammar_does_not_allow_are_a_fault(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    states = grammar.states(1)
    tokens = encoded(compiler, "no object")
    assert tokens_after(states, tokens) == set()
    state = states.at(tokens)
    assert "the grammar cannot continue" in str(state.fault)
    assert not any(state.admits(token) for token in [*range(100), *compiler.eos_token_ids])


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    first, second = (compiler.compile(StructuredOutputsParams(regex="a+b")) for _ in range(2))
    assert first is second


@pytest.mark.parametrize(
    "text",
    [
        "the cat's 3 hats cost 1234567.89 euros,   or\n\n  nothing\tat all",
        "ÄÖü ß 漢字かな 🙂👩‍👩‍👧 \u200b zero",
        "x" * 300,
        "def f(a, b):\n        return {'k': [a] * 12345}\n",
    ],
)
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_text_that_must_come_has_the_tokens_that_llguidance_finds_at_each_state(
    compiler: GrammarCompiler, text: str, num_before: int
) -> None:
    grammar = compiler.compile(
        StructuredOutputsParams(choice=["another text", text, f"{text}s", f"{text}, and"])
    )
    tokens = encoded(compiler, text)[: 1 + num_before]
    states, num_known = grammar.states(4), 0
    while tokens[-1:] != list(compiler.eos_token_ids):
        state = states.at(tokens)
        num_known += state.known_next is not None
        native = np.frombuffer(state.matcher.deep_copy().compute_bitmask(), np.uint8)
        allowed = set(np.flatnonzero(np.unpackbits(native, bitorder="little")).tolist())
        assert tokens_after(states, tokens) == allowed
        # As for a request that is computed again.
        assert tokens_after(grammar.states(1), tokens) == allowed
        tokens = [*tokens, max(allowed)]
    assert num_known > 3
