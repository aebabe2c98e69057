"""Requests that are fed with tokens that are known beforehand, without a model."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pagedserve.engine.output_processor import make_output
from pagedserve.engine.request import Request, RequestTable, Sequence, start_search
from pagedserve.engine.row_sampler import RowSampler
from pagedserve.engine.step import StepUpdate, process_step, record_step
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.output.stop import Finish, StopRule
from pagedserve.outputs import RequestMetrics, RequestOutput
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling_params import RequestOutputKind, SamplingParams


def make_request(
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_token_ids: SequenceOf[int] = (),
    **given: Any,
) -> Request:
    """A request of one prompt token, as an engine would make it."""
    params = SamplingParams(**given)
    rule = StopRule.from_params(params, eos_token_ids=eos_token_ids, max_new_tokens=1000)
    detokenizer = None
    if params.detokenize:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
    search = start_search(params, rule, detokenizer) if params.use_beam_search else None
    sampler = RowSampler(
        params,
        prompt_token_ids=[1],
        bad_words=None,
        banned_at_first=(),
        num_candidates=0,
        key=(0,),
    )
    return Request(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1],
        params=params,
        rule=rule,
        row_sampler=sampler,
        detokenizer=detokenizer,
        output_kind=RequestOutputKind.FINAL_ONLY if search else params.output_kind,
        metrics=RequestMetrics(1.0),
        salt=0,
        priority=0,
        search=search,
        prompt_logprobs=None,
    )


def drawn(tokens: SequenceOf[int], *, num_draws: int = 1) -> SampledRows:
    """Samples of rows that drew ``num_draws`` tokens each."""
    starts = np.arange(len(tokens) // num_draws + 1) * num_draws
    return SampledRows(np.array(tokens, dtype=np.int32), starts, None, None, {})


def living(requests: SequenceOf[Request]) -> list[Sequence]:
    """The sequences that have not ended, in order."""
    return [
        sequence
        for request in requests
        for sequence in request.sequences
        if sequence.finish is None
    ]


def record(update: StepUpdate, now: float = 3.0) -> list[Request]:
    """Take a step down under handles of its outputs' numbers."""
    return record_step(update, range(len(update.tokens)), RequestTable(), now)


def feed(request: Request, *tokens: int, num_draws: int = 1, now: float = 3.0) -> None:
    """Give the next tokens to the sequences that have not ended."""
    record(process_step(living([request]), drawn(tokens, num_draws=num_draws)), now)


def end(request: Request, finish: Finish | None = None) -> RequestOutput:
    """The last output."""
    request.is_finished = True
    request.finish = finish
    return make_output(request)
