"""The reference is transformers' own beam search, on a tiny model in float64 and on the real one.

The tiny model computes in float64 so that no two orders of its sums can swap two candidates:
transformers keeps a cache and this file's loop computes every sequence anew.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from pagedserve.output.beam import Beam, BeamRow, BeamSearch, Hypothesis
from pagedserve.output.logprobs import TopLogprobs
from pagedserve.output.stop import Finish

pytestmark = pytest.mark.usefixtures("one_thread")

FinishOf = Callable[[Beam], Finish | None]
# [B, V] float32 log-probabilities of what follows each of B beams.
Model = Callable[[Sequence[Beam]], NDArray[np.float32]]

VOCABULARY = 50
PAD = VOCABULARY - 1
KINDS: list[dict[str, Any]] = [
    {"length_penalty": length_penalty, "early_stopping": early_stopping}
    for length_penalty in (0.0, 0.6, 1.0, 2.0, -1.0)
    for early_stopping in (True, False, "never")
]
STOP, ABORT = Finish("stop"), Finish("abort")


def ends_with(*tokens: int) -> FinishOf:
    return lambda beam: STOP if beam.token_ids[-1] in tokens else None


def begin(width: int, **changes: Any) -> BeamSearch:
    """A search with the defaults of transformers, except for what is given."""
    given: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": False, "max_tokens": 20}
    return BeamSearch.start(width, **given | {"num_ending_tokens": 1} | changes)


def row_of(logprobs: NDArray[np.float32], num_candidates: int) -> BeamRow:
    order = np.argsort(-logprobs, kind="stable")[:num_candidates].astype(np.int32)
    return BeamRow(order, logprobs[order])


def run_to_end(search: BeamSearch, model: Model, finish_of: FinishOf) -> BeamSearch:
    is_done = False
    while not is_done:
        rows = [row_of(row, search.num_candidates) for row in model(search.beams)]
        search, _, is_done = search.step(rows, finish_of)
    return search


# Against transformers.


def make_model(seed: int) -> Any:
    """Two layers with weights large enough that some tokens are much likelier than others."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.35,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


def model_of(model: Any, prompt: Sequence[int]) -> Model:
    """Each beam computed from its first token, once: no cache that could hide a wrong parent."""
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    @torch.inference_mode()
    def logprobs(beams: Sequence[Beam]) -> NDArray[np.float32]:
        new = [beam.token_ids for beam in beams if beam.token_ids not in known]
        if new:
            logits = model(torch.tensor([[*prompt, *token_ids] for token_ids in new])).logits
            known.update(zip(new, logits[:, -1].float().log_softmax(-1).numpy(), strict=True))
        return np.stack([known[beam.token_ids] for beam in beams])

    return logprobs


def generate(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """For each prompt, what transformers returns: W pairs of padded new tokens and score."""
    made = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=PAD,
        **options,
    )
    sequences = made.sequences[:, len(prompts[0]) :].tolist()
    pairs = list(zip(sequences, made.sequences_scores.tolist(), strict=True))
    width = options["num_beams"]
    return [pairs[start : start + width] for start in range(0, len(pairs), width)]


def assert_equal(found: Sequence[Hypothesis], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for hypothesis, (padded, score) in zip(found, expected, strict=True):
        length = len(hypothesis.beam.token_ids)
        assert list(hypothesis.beam.token_ids) == padded[:length]
        assert set(padded[length:]) <= {PAD, -1}  # -1 is transformers' where no token ends
        assert hypothesis.score == pytest.approx(score, abs=1e-4)


def likely_tokens(model: Any, count: int) -> list[int]:
    """The tokens that are likeliest on average after 200 random contexts."""
    contexts = [tuple(random.Random(seed).choices(range(VOCABULARY), k=6)) for seed in range(200)]
    logprobs = model_of(model, [0])([Beam(token_ids) for token_ids in contexts])
    return [int(token) for token in np.argsort(-np.exp(logprobs).mean(0))[:count]]


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize(("seed", "num_eos"), [(0, 1), (1, 2), (2, 1), (3, 2), (4, 0)])
def test_equals_transformers(seed: int, num_eos: int, width: int) -> None:
    """30 searches: every penalty with every kind of early stopping, two lengths, two prompts."""
    rng = random.Random(seed)
    model = make_model(seed)
    eos = rng.sample(likely_tokens(model, 6), num_eos)
    model.generation_config.eos_token_id = eos or None
    prompts = [rng.choices(range(VOCABULARY), k=5) for _ in range(2)]
    models = [model_of(model, prompt) for prompt in prompts]
    for number, kind in enumerate(KINDS):
        longest = (8, 20)[(number + seed) % 2]  # each kind has both: with other seeds the other
        max_tokens = rng.randint(longest // 2 - 3, longest)
        reference = generate(model, prompts, num_beams=width, max_new_tokens=max_tokens, **kind)
        start = begin(width, max_tokens=max_tokens, num_ending_tokens=num_eos, **kind)
        for prompted, expected in zip(models, reference, strict=True):
            assert_equal(run_to_end(start, prompted, ends_with(*eos)).best(width), expected)


class SumOfLastTwo(StoppingCriteria):
    """Ends about a quarter of all sequences: as stop strings do, whatever their last token is."""

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        return input_ids[:, -2:].sum(-1) % 4 == 0


@pytest.mark.parametrize("width", [2, 4, 8])
def test_equals_transformers_where_any_token_may_end(width: int) -> None:
    model = make_model(7)
    prompt = [3, 1, 4, 1, 5]

    def finish_of(beam: Beam) -> Finish | None:
        return STOP if sum([*prompt, *beam.token_ids][-2:]) % 4 == 0 else None

    criteria = StoppingCriteriaList([SumOfLastTwo()])
    options = {"num_beams": width, "max_new_tokens": 12, "stopping_criteria": criteria}
    for kind in KINDS:
        (expected,) = generate(model, [prompt], **options, **kind)
        start = begin(width, max_tokens=12, num_ending_tokens=0, **kind)
        found = run_to_end(start, model_of(model, prompt), finish_of).best(width)
        assert_equal(found, expected)


# tests/engine/test_beams.py compares whole requests with what is recorded of it.
@pytest.mark.slow
@pytest.mark.parametrize("text", ["The capital of France is", "Is ice cold? Yes or no?"])
def test_so_it_does_on_the_real_model(text: str, peer: Any, real_tokenizer: Any) -> None:
    eos = peer.generation_config.eos_token_id
    prompt = real_tokenizer(text).input_ids
    (expected,) = generate(peer, [prompt], num_beams=4, max_new_tokens=12)
    search = run_to_end(begin(4, max_tokens=12), model_of(peer, prompt), ends_with(eos))
    assert_equal(search.best(4), expected)


# The definition, a step at a time.

EOS = 0


def row(given: dict[int, float], top: TopLogprobs | None = None) -> BeamRow:
    """The candidates of one beam, likeliest first."""
    return BeamRow(np.array([*given], np.int32), np.array([*given.values()], np.float32), top)


def tokens_of(beams: Iterable[Beam]) -> list[tuple[int, ...]]:
    return [beam.token_ids for beam in beams]


def endings_of(search: BeamSearch) -> list[tuple[int, ...]]:
    return tokens_of(hypothesis.beam for hypothesis in search.hypotheses)


@pytest.mark.parametrize(("num_ending_tokens", "expected"), [(0, 6), (1, 6), (2, 9), (5, 18)])
def test_candidates_leave_w_that_go_on(num_ending_tokens: int, expected: int) -> None:
    assert begin(3, num_ending_tokens=num_ending_tokens).num_candidates == expected


def test_an_ending_among_the_first_w_is_a_hypothesis_and_takes_no_beam() -> None:
    first = row({EOS: -1.0, 1: -2.0, 2: -3.0, 3: -4.0})
    search, parents, is_done = begin(2).step([first], ends_with(EOS))
    assert endings_of(search) == [(EOS,)]
    assert tokens_of(search.beams) == [(1,), (2,)]
    assert parents == [0, 0]
    assert not is_done


def test_an_ending_below_the_first_w_is_lost() -> None:
    first = row({EOS: -1.0, 1: -2.0, 9: -3.0, 2: -4.0})
    search = begin(2).step([first], ends_with(EOS, 9)).search
    assert (endings_of(search), tokens_of(search.beams)) == ([(EOS,)], [(1,), (2,)])


def test_a_search_is_over_where_every_candidate_ends() -> None:
    seven = row({token: -float(token) for token in range(1, 8)})
    start = begin(2, early_stopping="never")  # K is 4
    search, _, is_done = start.step([seven], ends_with(1, 2, 3, 4))
    assert is_done
    assert endings_of(search) == [(1,), (2,)]


def test_beams_are_in_the_order_of_their_parents_then_of_their_ranks() -> None:
    search = begin(4).step([row({1: -1.0, 2: -1.1, 3: -9.0, 4: -9.1})], ends_with()).search
    flat = row({5: -1.0, 6: -2.0})
    step = search.step([flat, row({5: -0.5, 6: -0.6}), flat, flat], ends_with())
    assert step.parents == [0, 0, 1, 1]
    assert tokens_of(step.search.beams) == [(1, 5), (1, 6), (2, 5), (2, 6)]


def after_two_steps(going_on: float, **changes: Any) -> tuple[BeamSearch, bool]:
    """Hypotheses with sums -1 (one token) and -5 (two); beams, the best of sum ``going_on``."""
    first = row({EOS: -1.0, 1: -2.0, 2: -9.0})
    search = begin(2, **changes).step([first], ends_with(EOS)).search
    best_two = sorted({3: going_on + 2.0, EOS: -3.0}.items(), key=lambda pair: -pair[1])
    rows = [row({**dict(best_two), 4: -20.0}), row({3: -30.0, 4: -31.0, 5: -32.0})]
    search, _, is_done = search.step(rows, ends_with(EOS))
    return search, is_done


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
def test_a_score_divides_by_the_new_tokens_the_ending_one_included(length_penalty: float) -> None:
    search, _ = after_two_steps(-4.0, length_penalty=length_penalty)
    scores = {hypothesis.beam.token_ids: hypothesis.score for hypothesis in search.hypotheses}
    assert scores == pytest.approx({(EOS,): -1.0, (1, EOS): -5.0 / 2**length_penalty})


@pytest.mark.parametrize(
    ("length_penalty", "going_on", "done_under"),
    [
        # The better of the beams, at its two tokens, is above the worse hypothesis, or is not.
        (1.0, -4.8, {True}),
        (1.0, -5.2, {True, False}),  # -5.2 / 20 is above
        (0.0, -4.8, {True}),
        (0.0, -5.2, {True, False, "never"}),
        (-1.0, -4.8, {True}),
        (-1.0, -5.2, {True, False, "never"}),  # shorter is better, so "never" looks no further
    ],
)
def test_early_stopping(length_penalty: float, going_on: float, done_under: set[Any]) -> None:
    for early_stopping in (True, False, "never"):
        kind = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        search, is_done = after_two_steps(going_on, **kind)
        assert is_done == (early_stopping in done_under) == (not search.beams)


def test_at_max_tokens_the_best_w_end_and_compete() -> None:
    search, _ = after_two_steps(-4.0, max_tokens=3, length_penalty=0.0)
    assert [hypothesis.score for hypothesis in search.hypotheses] == [-1.0, -5.0]
    finish_of = Mock(side_effect=ends_with(EOS))
    rows = [row({5: -0.5, EOS: -0.7, 6: -0.8}), row({5: -1.0, 6: -2.0, 7: -3.0})]
    search, parents, is_done = search.step(rows, finish_of)
    assert (search.beams, parents, is_done) == ((), [], True)
    assert endings_of(search) == [(EOS,), (1, 3, 5)]
    assert [hypothesis.finish for hypothesis in search.best(2)] == [STOP, Finish("length")]
    assert finish_of.call_count == 2  # nobody asks for what cannot count


def test_an_end_at_the_last_token_is_a_stop() -> None:
    search = begin(1, max_tokens=1).step([row({EOS: -1.0, 1: -2.0})], ends_with(EOS)).search
    assert [hypothesis.finish for hypothesis in search.best(1)] == [STOP]


def test_sums_are_rounded_to_float32() -> None:
    step = begin(1).step([row({1: -0.1, 2: -9.0})], ends_with())
    step = step.search.step([row({1: -1000.3, 2: -2000.0})], ends_with())
    assert step.search.beams[0].cumulative_logprob == float(np.float32(-0.1) + np.float32(-1000.3))


def test_an_ending_is_asked_for_no_further_than_needed() -> None:
    finish_of = Mock(return_value=None)
    begin(4).step([row({token: -float(token) for token in range(1, 9)})], finish_of)
    assert [call.args[0].token_ids for call in finish_of.call_args_list] == [(1,), (2,), (3,), (4,)]


def test_banned_and_undefined_candidates_do_not_exist() -> None:
    search = begin(2).step([row({1: -1.0, 2: -math.inf, 3: math.nan})], ends_with()).search
    assert tokens_of(search.beams) == [(1,)]
    search, _, is_done = search.step([row({1: -math.inf, 2: math.nan})], ends_with())
    assert is_done
    assert search.best(2) == []


def test_a_search_cut_short_counts_its_beams_as_they_stand() -> None:
    search, _ = after_two_steps(-4.0)
    assert [hypothesis[1:] for hypothesis in search.best(2, ABORT)] == [(-1.0, STOP), (-2.0, ABORT)]
    assert [hypothesis.score for hypothesis in search.best(2)] == [-1.0, -2.5]
    assert begin(2).best(2, ABORT) == [Hypothesis(Beam(), 0.0, ABORT)]


def test_log_probabilities_follow_their_beam() -> None:
    top = [TopLogprobs(np.array([n], np.int32), np.zeros(1, np.float32)) for n in range(3)]
    search = begin(2).step([row({1: -1.0, 2: -1.5}, top[0])], ends_with()).search
    rows = [row({3: -9.0, 4: -9.5}, top[1]), row({5: -1.0, 6: -2.0}, top[2])]
    step = search.step(rows, ends_with())
    assert step.parents == [1, 1]
    better, worse = (beam.logprobs for beam in step.search.beams)
    assert better == ((-1.5, 2, top[0]), (-1.0, 1, top[2]))
    assert worse == ((-1.5, 2, top[0]), (-2.0, 2, top[2]))


def test_a_step_wants_a_row_for_each_beam() -> None:
    candidates = row({EOS: -1.0, 1: -2.0})
    with pytest.raises(ValueError, match="longer"):
        begin(2).step([candidates, candidates], ends_with())
    over = begin(1, max_tokens=1).step([candidates], ends_with()).search
    with pytest.raises(ValueError, match="at least one"):
        over.step([], ends_with())


# Whatever the model says.


def random_model(seed: int) -> Model:
    """Twelve tokens, a third of them banned, different after every sequence."""

    def logprobs(beams: Sequence[Beam]) -> NDArray[np.float32]:
        generators = (np.random.default_rng([seed, *beam.token_ids]) for beam in beams)
        rows = np.stack([generator.normal(scale=3, size=12) for generator in generators])
        rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
        rows[rows < np.quantile(rows, 0.33)] = -np.inf
        return rows.astype(np.float32)

    return logprobs


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    width=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
    endings=st.sets(st.integers(0, 11), max_size=4),
)
def test_what_holds_after_every_step(
    seed: int, width: int, kind: dict[str, Any], endings: set[int]
) -> None:
    search = begin(width, max_tokens=8, num_ending_tokens=len(endings), **kind)
    model, finish_of, is_done = random_model(seed), ends_with(*endings), False
    while not is_done:
        before = search
        rows = [row_of(logprobs, search.num_candidates) for logprobs in model(search.beams)]
        given = repr((before, rows))
        step = before.step(rows, finish_of)
        assert step == before.step(rows, finish_of)
        assert repr((before, rows)) == given

        search, parents, is_done = step
        assert is_done == (not search.beams)
        assert len(search.beams) == len(parents) <= width >= len(search.hypotheses)
        assert parents == sorted(parents)
        for beam, parent in zip(search.beams, parents, strict=True):
            assert beam.token_ids[:-1] == before.beams[parent].token_ids
            assert math.isfinite(beam.cumulative_logprob)
            assert finish_of(beam) is None
        answer = search.best(width, ABORT)
        assert [hypothesis.score for hypothesis in answer] == sorted(
            (hypothesis.score for hypothesis in answer), reverse=True
        )
        assert all(math.isfinite(hypothesis.score) for hypothesis in answer)
