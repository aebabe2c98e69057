import numpy as np
import pytest

from pagedserve.engine.row_sampler import RowSampler, UniformStream
from pagedserve.sampling.bad_words import BadWords
from pagedserve.sampling_params import SamplingParams

BANNED = (2, 9)


def source(params: SamplingParams, *key: int, bad_words: BadWords | None = None) -> RowSampler:
    return RowSampler(
        params,
        prompt_token_ids=[7],
        bad_words=bad_words,
        banned_at_first=BANNED if params.min_tokens else (),
        num_candidates=0,
        key=key or (0,),
    )


def test_uniforms_depend_on_key_and_index_alone() -> None:
    stream, same, other = UniformStream(0, 5), UniformStream(0, 5), UniformStream(1, 5)
    numbers = [stream.at(index) for index in range(200)]
    assert [same.at(index) for index in range(0, 200, 7)] == numbers[::7]
    assert len({*numbers, *(other.at(index) for index in range(200))}) == 400


@pytest.mark.parametrize(("key", "other"), [((0, 2**32, 0), (0, 0, 1)), ((0, 5), (0, 5, 0))])
def test_keys_of_several_sizes_have_different_numbers(
    key: tuple[int, ...], other: tuple[int, ...]
) -> None:
    assert UniformStream(*key).at(0) != UniformStream(*other).at(0)


def test_a_uniform_can_be_asked_for_again() -> None:
    numbers = [UniformStream(3).at(index) for index in range(300)]
    stream = UniformStream(3)
    for index in range(1, 300):
        # A step that failed with the next already launched asks for the one before.
        assert stream.at(index) == numbers[index]
        assert stream.at(index - 1) == numbers[index - 1]
        assert 0 <= numbers[index] < 1


def test_uniforms_are_uniform() -> None:
    stream = UniformStream(3)
    numbers = [stream.at(index) for index in range(20_000)]
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert np.all(np.abs(counts - 2000) < 200)


def test_a_greedy_row_is_made_once() -> None:
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=1e-9),
    ):
        rows = source(params)
        assert rows.row([], 0) is rows.row([4], 0)
        assert rows.row([], 0).is_greedy


def test_a_random_row_has_the_parameters_and_its_number() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, seed=8)
    row = source(params, 0, 8).row([4, 5, 6], 0)
    assert (row.temperature, row.top_p, row.top_k, row.min_p) == (0.7, 0.9, 40, 0.1)
    assert row.uniforms == (UniformStream(0, 8, 0).at(3),)
    assert not row.is_greedy


def test_the_first_row_draws_for_every_sequence_and_later_ones_for_their_own() -> None:
    rows = source(SamplingParams(n=2, best_of=3, seed=8), 0, 8)
    streams = [UniformStream(0, 8, index) for index in range(3)]
    assert rows.row([], 0).uniforms == tuple(stream.at(0) for stream in streams)
    assert rows.row([4, 5], 2).uniforms == (streams[2].at(2),)


def test_ending_tokens_are_banned_before_min_tokens_only() -> None:
    for params in (SamplingParams(min_tokens=2), SamplingParams(min_tokens=2, temperature=0)):
        rows = source(params)
        edits = [rows.row([4] * count, 0).edits for count in range(3)]
        assert [edit and edit.banned_token_ids for edit in edits] == [BANNED, BANNED, None]


def test_bad_words_are_banned_besides_ending_tokens() -> None:
    rows = source(SamplingParams(min_tokens=2), bad_words=BadWords(((4, 5), (6,))))
    edits = [rows.row([4] * count, 0).edits for count in range(3)]
    assert [edit and edit.banned_token_ids for edit in edits] == [
        (*BANNED, 6),
        (*BANNED, 5, 6),
        (5, 6),
    ]


def test_edits_have_what_the_request_says_and_has() -> None:
    params = SamplingParams(presence_penalty=0.5, logit_bias={3: 1.5}, allowed_token_ids=[3, 4])
    edits = source(params).row([4, 3], 0).edits
    assert edits is not None
    assert (edits.prompt_token_ids, edits.output_token_ids) == ([7], [4, 3])
    assert (edits.presence_penalty, edits.logit_bias) == (0.5, ((3, 1.5),))
    assert edits.allowed_token_ids == (3, 4)
