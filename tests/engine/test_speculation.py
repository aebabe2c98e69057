"""Guessed tokens change how long a text takes, never the text, whoever guesses.

The answers of an engine without guesses are the oracle, log-probabilities bit for bit; whoever
guesses may know them, or nothing.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from pagedserve import RequestOutputKind, SamplingParams
from pagedserve.errors import ConfigError
from pagedserve.inputs import TokensPrompt
from tests.support.drafts import MOST, NGRAM, Guesser, Noise, drafting
from tests.support.every_way import MEMORIES, NUM_REQUESTS, Model, tiny_model

GUESSERS = {
    "right": (Guesser, 99),
    "never right": (Guesser, 0),
    "right up to two": (Guesser, 2),
    "noise": (Noise, 0),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield from tiny_model(tmp_path_factory.mktemp("speculation"))


def answers_of(model: Model) -> dict[tuple[int, ...], list[list[int]]]:
    answers: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for prompt, said in zip(model.prompts, model.expected(is_async=False), strict=True):
        tokens: list[Any] = list(prompt["prompt_token_ids"])
        answers[tuple(tokens)] += [list(entry[0]) for entry in said]  # type: ignore[call-overload]
    return answers


# Every day: every proposer with swapping, and every memory with drafts that are partly right.
EVERY_WAY = [
    pytest.param(
        memory,
        guesser,
        marks=() if memory == "swap" or guesser == "right up to two" else pytest.mark.slow,
    )
    for memory in MEMORIES
    for guesser in (*GUESSERS, "lookup", "suffix")
]


@pytest.mark.parametrize(("memory", "guesser"), EVERY_WAY)
def test_the_answers_are_those_without_guesses(tiny: Model, memory: str, guesser: str) -> None:
    expected = tiny.expected(is_async=False)
    config = NGRAM | {
        "method": "suffix" if guesser == "suffix" else "ngram",
        "prompt_lookup_min": 1,
    }
    llm = tiny.load(MEMORIES[memory] | {"speculative_config": config})
    proposer = None
    if guesser in GUESSERS:
        kind, num_right = GUESSERS[guesser]
        proposer = kind(answers_of(tiny), num_right)
    drafting(llm, proposer)
    for _ in range(2):
        found = tiny.run(llm, is_async=False)
        different = [number for number in range(NUM_REQUESTS) if found[number] != expected[number]]
        assert found == expected, f"requests {different} differ"
    stats = llm.llm_engine.stats
    assert stats.num_draft_tokens > 0
    if guesser == "right":
        assert stats.num_accepted_tokens > stats.num_draft_tokens * 0.7  # n sequences may differ
    if guesser == "never right":
        assert stats.num_accepted_tokens == 0
    if guesser == "right up to two":
        assert (
            len(stats.num_accepted_by_place)
            > 2
            == len([count for count in stats.num_accepted_by_place if count])
        )


def test_right_guesses_take_one_step_for_all_of_them(tiny: Model) -> None:
    prompt: TokensPrompt = {"prompt_token_ids": [5, 6, 7]}
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    plain = tiny.load({"num_gpu_blocks": 64})
    (answer,) = plain.generate([prompt], params, use_tqdm=False)
    tokens = list(answer.outputs[0].token_ids)
    llm = tiny.load({"num_gpu_blocks": 64, "speculative_config": NGRAM})
    drafting(llm, Guesser({(5, 6, 7): [tokens]}, 99))
    (found,) = llm.generate([prompt], params, use_tqdm=False)
    assert found.outputs[0].token_ids == answer.outputs[0].token_ids
    # The prompt's token, and then six at a time.
    assert llm.llm_engine.stats.num_steps == 1 + 30 // (MOST + 1)
    assert found.metrics is not None
    assert (found.metrics.num_draft_tokens, found.metrics.num_accepted_tokens) == (25, 25)
    assert llm.llm_engine.stats.num_generation_tokens == 31


def test_streams_bring_all_tokens_of_a_step_at_once(tiny: Model) -> None:
    prompt: TokensPrompt = {"prompt_token_ids": [5, 6, 7]}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 13, "ignore_eos": True}
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **greedy)
    llm = tiny.load({"num_gpu_blocks": 64, "speculative_config": NGRAM})
    tokens = llm.generate([prompt], SamplingParams(**greedy), use_tqdm=False)
    whole = list(tokens[0].outputs[0].token_ids)
    drafting(llm, Guesser({(5, 6, 7): [whole]}, 99))
    engine, deltas = llm.llm_engine, []
    engine.add_request("a", prompt, params)
    while engine.has_unfinished_requests():
        deltas += [list(output.outputs[0].token_ids) for output in engine.step()]
    assert deltas == [whole[:1], whole[1:7], whole[7:]]


def test_callers_logits_processors_are_asked_once_a_token(tiny: Model) -> None:
    asked = []

    def note(token_ids: list[int], logits: Any) -> Any:
        asked.append(len(token_ids))
        return logits

    llm = drafting(tiny.load({"num_gpu_blocks": 64, "speculative_config": NGRAM}))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[note])
    llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 5, 6]), params, use_tqdm=False)
    assert asked == list(range(9))


def test_a_sequence_is_not_guessed_beyond_its_end(tiny: Model) -> None:
    """Neither beyond max_tokens nor beyond the model's length, where no slot would be."""
    llm = tiny.load({"num_gpu_blocks": 64, "speculative_config": NGRAM, "max_model_len": 16})
    plain = tiny.load({"num_gpu_blocks": 64, "max_model_len": 16})
    drafting(llm, Noise({}, 0))
    for max_tokens in (1, 2, 3, 13, None):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        found, wanted = [
            engine.generate(TokensPrompt(prompt_token_ids=[5, 6, 7]), params, use_tqdm=False)[0]
            for engine in (llm, plain)
        ]
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].finish_reason == "length"


def test_earlier_outputs_are_looked_up_under_the_same_salt(tiny: Model) -> None:
    config = NGRAM | {"method": "suffix"}
    llm = drafting(tiny.load({"num_gpu_blocks": 64, "speculative_config": config}))
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    accepted = []
    for salt in ("a", "a", "b", "a"):
        prompt = TokensPrompt(prompt_token_ids=[5, 6, 7], cache_salt=salt)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.metrics is not None
        accepted.append(output.metrics.num_accepted_tokens)
    own = accepted[0]  # what the text repeats of itself
    assert accepted == [own, accepted[1], own, accepted[1]]
    assert accepted[1] >= own + 10


@pytest.mark.parametrize("memory", ["swap", "all at once"])
def test_a_smaller_model_guesses(
    tiny: Model, memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As small as the large one, and so always right about what is likeliest."""
    config = {"model": tiny.name, "num_speculative_tokens": 3, "kv_cache_memory": 1 << 22}
    llm = drafting(tiny.load(MEMORIES[memory] | {"speculative_config": config}))
    assert tiny.run(llm, is_async=False) == tiny.expected(is_async=False)
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    (answer,) = llm.generate(TokensPrompt(prompt_token_ids=[5, 6, 7]), params, use_tqdm=False)
    assert answer.metrics is not None
    assert (answer.metrics.num_draft_tokens, answer.metrics.num_accepted_tokens) == (12, 12)
    assert "no draft tokens" not in caplog.text


def test_a_smaller_model_with_other_tokens_is_refused(tiny: Model, model_package: None) -> None:
    with pytest.raises(ConfigError, match="whose tokens are not those of"):
        tiny.load({"num_gpu_blocks": 64, "speculative_config": {"model": "smollm2"}})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "eagle"}, "method is 'eagle'; it must be one of ngram, suffix, draft_model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": 33}, "from 1 to 32"),
        ({"prompt_lookup_min": 9, "prompt_lookup_max": 3}, "at most prompt_lookup_max, 3"),
        ({"method": "draft_model"}, "has method 'draft_model' and model None"),
        ({"method": "ngram", "model": "smollm2"}, "has method 'ngram' and model 'smollm2'"),
        ({"num_speculative_token": 3}, "did you mean num_speculative_tokens?"),
        ("ngram", "a mapping with names for keys"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(tiny: Model, config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as refusal:
        tiny.load({"speculative_config": config})
    assert said in str(refusal.value)


def test_vllms_older_names_are_understood(tiny: Model) -> None:
    config = {"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    llm = tiny.load({"num_gpu_blocks": 64, "speculative_config": config})
    drafts = llm.llm_engine.input_processor.args.speculative_config
    assert drafts is not None
    assert (drafts.method, drafts.match_lengths) == ("ngram", (2, 4))
