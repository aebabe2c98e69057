"""Checks of the sampler that need neither torch nor transformers; run as a program."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from pagedserve.executor.launched import LaunchedRun
from pagedserve.sampling.grammar import GrammarState
from pagedserve.sampling.rows import LogitsEdits, PromptTargets, RowSampling
from pagedserve.sampling.sampler import Sampler, prompt_logprobs
from tests.support.numpy_sampling import Expected, expected, log_softmax

VOCAB_SIZE = 262  # of llguidance's tokenizer of bytes
ALLOWED = set(range(ord("a"), ord("n")))
Random = np.random.Generator


def halve(_: list[int], logits: NDArray[np.float32]) -> NDArray[np.float64]:
    return logits.astype(np.float64) / 2


def raise_length(token_ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    logits[len(token_ids)] += 3
    token_ids.clear()
    return logits


def matcher() -> LLMatcher:
    return LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_regex("[a-m]x*"))


def some_ids(random: Random, num: int) -> tuple[int, ...]:
    return tuple(random.integers(0, VOCAB_SIZE, num).tolist())


def some_edits(random: Random) -> LogitsEdits:
    """Edits of all kinds, in all combinations."""
    bias = dict.fromkeys(some_ids(random, 3), 2.5)
    return LogitsEdits(
        prompt_token_ids=some_ids(random, 20),
        output_token_ids=np.array(some_ids(random, 20), np.int32),
        presence_penalty=float(random.choice([0.0, 0.7])),
        frequency_penalty=float(random.choice([0.0, 0.3])),
        repetition_penalty=float(random.choice([1.0, 1.3])),
        logit_bias=tuple(sorted(bias.items())),
        allowed_token_ids=tuple(range(70, 200)) if random.random() < 0.3 else None,
        banned_token_ids=some_ids(random, 3),
        top_n_sigma=float(random.choice([-1.0, 2.0])),
        logits_processors=(raise_length, halve) if random.random() < 0.3 else (),
    )


def some_row(random: Random, state: GrammarState) -> RowSampling:
    """Parameters of all kinds, in all combinations."""
    return RowSampling(
        temperature=float(random.choice([0.0, 0.5, 1.0, 3.0])),
        top_k=int(random.choice([-1, -1, 1, 5, 100])),
        top_p=float(random.choice([0.2, 0.9, 1.0, 1.0])),
        min_p=float(random.choice([0.0, 0.0, 0.05])),
        uniforms=tuple(random.random(int(random.choice([1, 1, 1, 4]))).tolist()),
        second_uniform=float(random.random()),
        edits=some_edits(random) if random.random() < 0.5 else None,
        grammar=state.copy() if random.random() < 0.5 else None,
        num_logprobs=(None, 0, 3)[int(random.integers(3))],
        num_candidates=int(random.choice([0, 0, 0, 4])),
        label_token_ids=some_ids(random, 3) if random.random() < 0.3 else (),
    )


def check_all_kinds(rows: Sequence[RowSampling]) -> None:
    """Every parameter has another value than its default in some row."""
    edits = [row.edits for row in rows if row.edits is not None]
    for values, kind in ((rows, RowSampling), (edits, LogitsEdits)):
        for field in fields(kind):
            given = [getattr(value, field.name) for value in values]
            is_used = any(repr(value) != repr(field.default) for value in given)
            assert is_used or field.name == "pair_start", field.name  # read by pooling models alone


def check_rows(random: Random) -> None:
    logits = random.normal(size=(600, VOCAB_SIZE), scale=2).astype(np.float32)
    given = logits.copy()
    state = GrammarState(matcher(), [], -(-VOCAB_SIZE // 32))
    rows = [some_row(random, state) for _ in logits]
    check_all_kinds(rows)
    found = Sampler().sample(logits, rows)
    assert found.errors == {}
    assert np.array_equal(logits, given)
    for index, row in enumerate(rows):
        allowed = None if row.grammar is None else ALLOWED
        check_row(found, index, row, expected(logits[index], row, allowed))
        if row.label_token_ids:
            exact = log_softmax(logits[index].astype(np.float64))[list(row.label_token_ids)]
            assert np.allclose(found.labels[index], exact, atol=1e-5)
    assert found.labels.keys() == {i for i, row in enumerate(rows) if row.label_token_ids}


def check_row(found: Any, index: int, row: RowSampling, wanted: Expected) -> None:
    draws = slice(*found.draw_start[index : index + 2])
    assert found.tokens[draws].tolist() == wanted.tokens, (index, row)
    if num := row.num_candidates:
        ids = found.candidates.token_ids[index, :num].tolist()
        logprobs = found.candidates.logprobs[index, :num]
        assert ids == wanted.candidates[:num]
        assert np.allclose(logprobs, wanted.candidate_logprobs[ids], atol=1e-5)
    elif row.num_logprobs is not None:
        logprobs = wanted.logprobs[wanted.tokens]
        ranks = [1 + wanted.order.index(token) for token in wanted.tokens]
        assert np.allclose(found.logprobs.token_logprobs[draws], logprobs, atol=1e-5)
        assert found.logprobs.token_ranks[draws].tolist() == ranks
        ids = found.logprobs.top_token_ids[index].tolist()
        assert ids == wanted.order[:3]
        assert np.allclose(found.logprobs.top_logprobs[index], wanted.logprobs[ids], atol=1e-5)


def check_prompts(random: Random, num_top: int) -> None:
    """Also with more of the most likely than the Rust kernel sorts, and all of them."""
    logits = random.normal(size=(7, VOCAB_SIZE), scale=2).round(1).astype(np.float32)
    targets = PromptTargets(np.arange(7, dtype=np.int32), np.arange(7) * 30, num_top)
    output = LaunchedRun(prompts=targets, logits=logits).results().prompt_logprobs
    assert output is not None
    for found in (output, prompt_logprobs(targets, logits)):
        for index, (row, token) in enumerate(zip(logits, targets.token_ids, strict=True)):
            exact = log_softmax(row.astype(np.float64))
            order = np.lexsort((np.arange(VOCAB_SIZE), -row))[:num_top]
            assert abs(found.logprobs[index] - exact[token]) < 1e-5
            assert found.ranks[index] == 1 + (row > row[token]).sum()
            assert found.top_token_ids[index].tolist() == order.tolist()
            assert np.allclose(found.top_logprobs[index], exact[order], atol=1e-5)


def check_launched_tokens(random: Random) -> None:
    """Tokens for a step that is launched before this one has ended."""
    logits = random.normal(size=(9, VOCAB_SIZE)).astype(np.float32)
    rows = [RowSampling(temperature=row % 2, uniforms=(row / 9,)) for row in range(9)]
    launched = LaunchedRun(Sampler().launch(logits, rows))
    assert launched.is_async_safe
    tokens: Any = launched.tokens()
    assert (type(tokens), tokens.dtype) == (np.ndarray, np.int32)
    assert tokens.tolist() == launched.results().sampled.tokens.tolist()


def check_failures() -> None:
    def edits(result: Any) -> LogitsEdits:
        return LogitsEdits(logits_processors=(lambda _ids, _logits: result,))

    logits = np.zeros((6, 3), np.float32)
    logits[0, 1] = np.nan
    given = [[0.0] * 3, np.zeros(2, np.float32), np.zeros(3, np.int64), np.full(3, np.nan)]
    rows = [RowSampling(), *(RowSampling(edits=edits(value)) for value in given)]
    wanted = "expected a float array of shape [3]"
    assert Sampler().sample(logits, [*rows, RowSampling(temperature=0)]).errors == {
        0: "the logits hold NaN",
        1: f"logits processor <lambda> returned list, {wanted}",
        2: f"logits processor <lambda> returned float32 [2], {wanted}",
        3: f"logits processor <lambda> returned int64 [3], {wanted}",
        4: "logits processor <lambda> returned NaN",
    }


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    check_rows(generator)
    for number in (0, 3, 100, VOCAB_SIZE):
        check_prompts(generator, number)
    check_launched_tokens(generator)
    check_failures()
