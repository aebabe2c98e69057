"""The outputs of requests: recorded when a step is done, shown when a caller wants them.

Owns what the caller of a request sees: tokens, text, log-probabilities, reasons, times.  What a
step means is found out in ``judge``; ``apply`` records it and may be called again for the same
step (an interrupt may come in the middle).

Costs: about a microsecond a token; text is made only for outputs that somebody gets.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from pagedserve.output.beam import Beam, BeamSearch
from pagedserve.output.detokenizer import Detokenizer, TextStream, TextTokenizer
from pagedserve.output.judge import JudgedToken, RequestStep, stop_of
from pagedserve.output.logprobs import LogprobsView, TokenLogprob
from pagedserve.output.state import OutputState, SequenceState
from pagedserve.output.stop import Finish, StopRule, is_by_token
from pagedserve.output.stop_strings import StopMatch
from pagedserve.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from pagedserve.sampling_params import SamplingParams


class NewPromptLogprobs(NamedTuple):
    """What a step found out about a prompt: of its tokens from ``first`` on, counted from 0."""

    state: OutputState
    first: int
    entries: list[TokenLogprob]


class OutputProcessor:
    """Opens the state of a request, records what steps bring, and makes its outputs."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizers: dict[bool, Detokenizer] = {}

    def open(
        self,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        rule: StopRule,
        arrival_time: float,
        is_followed: bool,
    ) -> OutputState:
        """The state of a request without tokens.

        Args:
            request_id: The caller's name for it.
            prompt: Its text, or None where token ids were given.
            prompt_token_ids: The prompt's tokens.
            params: Its sampling parameters.
            rule: When its sequences end.
            arrival_time: Seconds of the engine's clock.
            is_followed: Whether the caller wants outputs before the last.  Beams, and the best of
                several, are not known before the end: those have the last output alone.
        """
        chooses_last = params.use_beam_search or params.max_num_running_seqs > params.n
        detokenizer = self._detokenizer(params) if params.detokenize else None
        state = OutputState(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            rule=rule,
            metrics=RequestMetrics(arrival_time),
            num_outputs=params.n,
            max_num_seqs=params.max_num_running_seqs,
            detokenizer=detokenizer,
            is_followed=is_followed and not chooses_last,
            num_logprobs=params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
            sequences=[],
            search=_search(params, rule, detokenizer) if params.use_beam_search else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
        )
        if state.search is None:
            state.sequences.append(state.new_sequence(0))
        return state

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        skip = params.skip_special_tokens
        if skip not in self._detokenizers:
            self._detokenizers[skip] = Detokenizer(self._tokenizer, skip_special_tokens=skip)
        return self._detokenizers[skip]

    def apply(
        self,
        requests: Iterable[RequestStep],
        prompts: Iterable[NewPromptLogprobs],
        now: float,
    ) -> None:
        """Record a step; a second call changes nothing.

        Args:
            requests: What ``judge`` found.
            prompts: What was found out about prompts.
            now: Seconds of the engine's clock.
        """
        for prompt in prompts:
            if prompt.state.prompt_logprobs is not None:
                prompt.state.prompt_logprobs[prompt.first :] = prompt.entries
        for request in requests:
            if request.failure is None and request.state.metrics.first_token_time is None:
                request.state.metrics.first_token_time = now
            if request.search is not None:
                request.state.search = request.search
            drawn = [one for one in request.outputs if isinstance(one, JudgedToken)]
            if len(drawn) > len(request.state.sequences):
                request.state.sequences = [one.sequence for one in drawn]
            for one in drawn:
                _record(one)

    def follow(self, state: OutputState) -> RequestOutput:
        """The output of a request that goes on, for a caller who follows it."""
        completions = []
        for place, sequence in enumerate(state.sequences):
            finish = sequence.finish
            if finish is None:
                text = _visible(state, sequence)
            else:
                text, finish = _sequence_end(state, sequence, finish)
            completions.append(_completion(state, place, sequence, text, finish))
        return _output(state, completions, is_finished=False)

    def conclude(self, state: OutputState, finish: Finish | None, now: float) -> RequestOutput:
        """The last output of a request.

        Args:
            state: The request.
            finish: Why it ended, for sequences that did not end by themselves.
            now: Seconds of the engine's clock.
        """
        state.metrics.finished_time = now
        if state.search is not None:
            return _output(state, _beam_completions(state, state.search, finish), is_finished=True)
        sequences = state.sequences
        if state.max_num_seqs > state.num_outputs:
            # Stable: of equals the one with the smaller index.
            sequences = sorted(sequences, key=_sum_of_logprobs, reverse=True)[: state.num_outputs]
        completions = [
            _completion(state, place, one, *_sequence_end(state, one, one.finish or finish))
            for place, one in enumerate(sequences)
        ]
        return _output(state, completions, is_finished=True)


def _search(params: SamplingParams, rule: StopRule, detokenizer: Detokenizer | None) -> BeamSearch:
    return BeamSearch.start(
        width=params.max_num_running_seqs,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_tokens=rule.max_tokens,
        num_ending_tokens=len(rule.endings),
        text=detokenizer.stream() if detokenizer is not None and rule.strings else None,
    )


def _record(token: JudgedToken) -> None:
    sequence = token.sequence
    sequence.token_ids[token.num_before :] = (token.token,)
    if token.logprob is not None and sequence.logprobs is not None:
        sequence.logprobs[token.num_before :] = (token.logprob,)
    if token.text is not None:
        sequence.text = token.text
    sequence.match = token.match
    sequence.finish = token.finish


def _sum_of_logprobs(sequence: SequenceState) -> float:
    return sequence.cumulative_logprob or 0.0


def _visible(state: OutputState, sequence: SequenceState) -> str:
    """The text that nothing to come can take back."""
    if sequence.text is None:
        return ""
    sequence.text = sequence.text.advanced(sequence.token_ids)
    text, strings = sequence.text.text, state.rule.strings
    return text if strings is None else strings.visible(text)


def _sequence_end(
    state: OutputState, sequence: SequenceState, finish: Finish | None
) -> tuple[str, Finish | None]:
    return _ended(state, sequence.token_ids, sequence.text, sequence.match, finish)


def _beam_end(state: OutputState, beam: Beam, finish: Finish) -> tuple[str, Finish]:
    match = stop_of(state.rule, beam, finish)
    text, end = _ended(state, beam.token_ids, beam.text_before, match, finish)
    return text, end or finish


def _ended(
    state: OutputState,
    token_ids: Sequence[int],
    before: TextStream | None,
    match: StopMatch | None,
    finish: Finish | None,
) -> tuple[str, Finish | None]:
    """The text of a sequence or beam that has ended, and why it ended.

    Args:
        state: Its request.
        token_ids: All its new tokens.
        before: Its text so far, without a token that ended it; None where nobody looked at it.
        match: The stop string that ended it.
        finish: Why it ended, as far as was known.
    """
    if state.detokenizer is None:
        return "", finish
    own = token_ids[:-1] if is_by_token(finish) else token_ids
    shown = token_ids if state.rule.shows_ending else own
    if before is None:
        return state.detokenizer.decode(shown), finish
    stream, strings = before.advanced(own), state.rule.strings
    if strings is not None:
        text = stream.text + stream.rest()
        if match is None and len(own) > state.rule.min_tokens:
            match = strings.find(text, len(stream.text))  # what was held back may complete one
        if match is not None:
            return strings.cut(text, match), Finish("stop", match.string)
    stream = stream.advanced(shown)
    return stream.text + stream.rest(), finish


def _completion(
    state: OutputState, place: int, sequence: SequenceState, text: str, finish: Finish | None
) -> CompletionOutput:
    return CompletionOutput(
        index=place,
        text=text,
        token_ids=list(sequence.token_ids),
        cumulative_logprob=sequence.cumulative_logprob,
        logprobs=_shown_logprobs(state, sequence.token_ids, sequence.logprobs),
        finish_reason=finish and finish.reason,
        stop_reason=finish and finish.stop_reason,
    )


def _beam_completions(
    state: OutputState, search: BeamSearch, finish: Finish | None
) -> list[CompletionOutput]:
    best = search.best(state.num_outputs, finish or Finish("length"))
    ends = [_beam_end(state, one.beam, one.finish) for one in best]
    return [
        CompletionOutput(
            index=place,
            text=text,
            token_ids=list(one.beam.token_ids),
            cumulative_logprob=one.beam.cumulative_logprob,
            logprobs=_shown_logprobs(state, one.beam.token_ids, one.beam.logprobs),
            finish_reason=end.reason,
            stop_reason=end.stop_reason,
        )
        for place, (one, (text, end)) in enumerate(zip(best, ends, strict=True))
    ]


def _shown_logprobs(
    state: OutputState, token_ids: Sequence[int], entries: Sequence[TokenLogprob] | None
) -> Logprobs | None:
    if state.num_logprobs is None:
        return None
    token_text = None if state.detokenizer is None else state.detokenizer.token_text
    view = LogprobsView(list(token_ids), list(entries or ()), token_text)
    return cast("Logprobs", view)  # every entry is there


def _output(
    state: OutputState, completions: list[CompletionOutput], *, is_finished: bool
) -> RequestOutput:
    prompt_logprobs = None
    if state.prompt_logprobs is not None:
        token_text = None if state.detokenizer is None else state.detokenizer.token_text
        entries = [None, *state.prompt_logprobs]
        prompt_logprobs = LogprobsView(state.prompt_token_ids, entries, token_text)
    return RequestOutput(
        request_id=state.request_id,
        prompt=state.prompt,
        prompt_token_ids=state.prompt_token_ids,
        outputs=completions,
        finished=is_finished,
        metrics=state.metrics,
        prompt_logprobs=prompt_logprobs,
    )
