"""Outputs of requests, created when they are returned to the caller.

Owns the contents of outputs: tokens, text, log-probabilities, finish reasons and times.  An output
covers everything since the last one, so nothing is lost if a step fails before it is returned.

Costs: text is detokenized only for outputs that are returned.  A delta costs the same at any
position of the sequence; a cumulative output copies tokens and text.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import cast

from pagedserve.engine.request import Request, Sequence
from pagedserve.output.beam import Beam
from pagedserve.output.detokenizer import TextStream
from pagedserve.output.logprobs import LogprobsView, TokenLogprob
from pagedserve.output.stop import Finish, StopMatch, StopRule, is_by_token
from pagedserve.outputs import CompletionOutput, Logprobs, RequestOutput
from pagedserve.sampling_params import RequestOutputKind


def make_output(request: Request) -> RequestOutput:
    """Create the next output of a request: its last if it has ended."""
    if request.search is not None:
        completions = _beam_completions(request)
    else:
        completions = _completions(request)
    prompt_logprobs = None
    if request.prompt_logprobs is not None:
        entries = [None, *request.prompt_logprobs]
        entries += [None] * (len(request.prompt_token_ids) - len(entries))
        prompt_logprobs = LogprobsView(request.prompt_token_ids, entries, _token_text(request))
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.shown_prompt,
        prompt_logprobs=prompt_logprobs,
        outputs=completions,
        finished=request.is_finished,
        metrics=request.metrics,
        lora_request=request.lora_request,
        num_cached_tokens=request.num_cached_tokens,
        pooled=request.pooled,
        encoder_prompt=None if request.encoder is None else request.encoder.text,
        encoder_prompt_token_ids=None if request.encoder is None else request.encoder.token_ids,
    )


def merge_outputs(
    request: Request, earlier: RequestOutput | None, later: RequestOutput
) -> RequestOutput:
    """Return the output that replaces two of a request, of which the earlier was not read."""
    if earlier is None or request.output_kind is not RequestOutputKind.DELTA:
        return later
    earlier.add(later)
    return earlier


def _completions(request: Request) -> list[CompletionOutput]:
    sequences = request.sequences
    if not request.is_plain and request.params.chooses_best:
        # Stable: on ties the smaller index is first.
        sequences = sorted(sequences, key=lambda sequence: -sequence.cumulative_logprob)
        sequences = sequences[: request.params.n]
    if request.output_kind is RequestOutputKind.DELTA:
        return [
            _delta(request, place, sequence)
            for place, sequence in enumerate(sequences)
            if not sequence.is_end_sent
        ]
    return [
        _completion(request, place, sequence, *_text_so_far(request, sequence))
        for place, sequence in enumerate(sequences)
    ]


def _delta(request: Request, place: int, sequence: Sequence) -> CompletionOutput:
    """Create the output for what is new in a sequence since its last delta."""
    text, finish = _text_so_far(request, sequence)
    first = sequence.num_sent_tokens
    completion = _completion(
        request, place, sequence, text[sequence.num_sent_chars :], finish, first=first
    )
    sequence.num_sent_tokens = len(sequence.token_ids)
    sequence.is_end_sent = finish is not None
    if sequence.text is not None and not sequence.is_end_sent:
        # Sent text is kept only as far back as a stop string may reach.
        strings = request.rule.strings
        num_kept = 0 if strings is None else strings.max_length - 1
        num_old = max(0, min(len(text), len(sequence.text.text) - num_kept))
        sequence.text = sequence.text.without(num_old)
        sequence.num_sent_chars = len(text) - num_old
    return completion


def _text_so_far(request: Request, sequence: Sequence) -> tuple[str, Finish | None]:
    """Final text of a sequence so far, and its finish reason if it has ended."""
    finish = sequence.finish or request.finish
    if finish is not None:
        return _ended(request, sequence.token_ids, sequence.text, sequence.stop_match, finish)
    if sequence.text is None:
        return "", None
    sequence.text = _caught_up(sequence.text, sequence.token_ids)
    text, strings = sequence.text.text, request.rule.strings
    return (text if strings is None else strings.visible(text)), None


def _caught_up(stream: TextStream, token_ids: SequenceOf[int]) -> TextStream:
    return stream.advanced(token_ids[stream.num_tokens :])


def _ended(
    request: Request,
    token_ids: SequenceOf[int],
    stream: TextStream | None,
    match: StopMatch | None,
    finish: Finish,
) -> tuple[str, Finish]:
    """Text of a sequence or beam that has ended, and its finish reason.

    Args:
        request: Request of the sequence.
        token_ids: All its new tokens.
        stream: Detokenized text without the token that ended it; None if it was not detokenized.
        match: Stop string that ended it.
        finish: Finish reason, if already known.
    """
    detokenizer, rule = request.detokenizer, request.rule
    if detokenizer is None:
        return "", finish
    own = token_ids[:-1] if is_by_token(finish) else token_ids
    shown = token_ids if rule.shows_ending else own
    if stream is None:
        return detokenizer.decode(shown), finish
    stream = _caught_up(stream, own)
    if rule.strings is not None:
        text, match = _first_match(rule, stream, match, len(own))
        if match is not None:
            return rule.strings.cut(text, match), Finish("stop", match.string)
    stream = _caught_up(stream, shown)
    return stream.text + stream.rest(), finish


def _first_match(
    rule: StopRule, stream: TextStream, match: StopMatch | None, num_tokens: int
) -> tuple[str, StopMatch | None]:
    """Complete the text of a stream, and find a stop string also in what was held back."""
    text = stream.text + stream.rest()
    if match is None and rule.strings is not None and num_tokens > rule.min_tokens:
        match = rule.strings.find(text, len(stream.text))
    return text, match


def _completion(
    request: Request,
    place: int,
    sequence: Sequence,
    text: str,
    finish: Finish | None,
    *,
    first: int = 0,
) -> CompletionOutput:
    """Create the output of a sequence, from new token number ``first`` on."""
    token_ids = sequence.token_ids[first:]
    has_sum = sequence.logprobs is not None
    return CompletionOutput(
        index=place,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=sequence.cumulative_logprob if has_sum else None,
        logprobs=_shown_logprobs(request, token_ids, (sequence.logprobs or [])[first:]),
        finish_reason=finish and finish.reason,
        stop_reason=finish and finish.stop_reason,
        lora_request=request.lora_request,
        label_logprobs=sequence.label_logprobs,
    )


def _beam_completions(request: Request) -> list[CompletionOutput]:
    search = request.search
    assert search is not None  # noqa: S101  # checked by the caller
    best = search.best(request.params.n, request.finish or Finish("length"))
    completions = []
    for place, (beam, _, finish) in enumerate(best):
        text, end = _beam_end(request, beam, finish)
        completions.append(
            CompletionOutput(
                index=place,
                text=text,
                token_ids=list(beam.token_ids),
                cumulative_logprob=beam.cumulative_logprob,
                logprobs=_shown_logprobs(request, beam.token_ids, beam.logprobs or ()),
                finish_reason=end.reason,
                stop_reason=end.stop_reason,
                lora_request=request.lora_request,
            )
        )
    return completions


def _beam_end(request: Request, beam: Beam, finish: Finish) -> tuple[str, Finish]:
    match = beam.stop_match(request.rule, finish)
    return _ended(request, beam.token_ids, beam.text_before, match, finish)


def _shown_logprobs(
    request: Request, token_ids: SequenceOf[int], entries: SequenceOf[TokenLogprob | None]
) -> Logprobs | None:
    if request.params.logprobs is None:
        return None
    view = LogprobsView(list(token_ids), list(entries), _token_text(request))
    return cast("Logprobs", view)  # entries are None only for tokens of another engine


def _token_text(request: Request) -> Callable[[int], str] | None:
    return None if request.detokenizer is None else request.detokenizer.token_text
