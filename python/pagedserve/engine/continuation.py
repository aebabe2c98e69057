"""Requests that go on behind tokens which another engine made of them.

Such a request is what it would be had this engine made them: they count for lengths, penalties,
stop strings, grammars and the place in the row of random numbers, so what follows is what would
have followed there.  To the scheduler they are part of the prompt, computed like it and found in
the prefix cache like it.
"""

from pagedserve._core import Scheduler
from pagedserve.engine.output_processor import make_output
from pagedserve.engine.request import Request
from pagedserve.errors import RequestError
from pagedserve.inputs import checked_token_ids
from pagedserve.output.stop import find_stop
from pagedserve.sampling_params import RequestOutputKind

_NAME = "output_token_ids"


def continue_behind(
    request: Request, token_ids: object, *, vocab_size: int, scheduler: Scheduler
) -> None:
    """Have a request that has no tokens yet go on behind these.

    Deltas bring what comes after them; other outputs have them too, without log-probabilities.

    Raises:
        RequestError: No token ids; tokens that end the request; one of several texts, or one whose
            prompt is scored.
    """
    given = checked_token_ids(token_ids, _NAME, vocab_size)
    params, rule, sequence = request.params, request.rule, request.sequences[0]
    if request.search is not None or params.max_num_running_seqs > 1:
        raise RequestError(f"{_NAME} continues one text; n and best_of must be 1, without beams")
    if request.prompt_logprobs is not None:
        raise RequestError(f"{_NAME} cannot be given with prompt_logprobs: ask for those alone")
    refusal = scheduler.prompt_refusal(len(request.prompt_token_ids) + len(given))
    if refusal is not None:
        raise RequestError(f"the prompt with {_NAME} {refusal}")
    for number, token in enumerate(given, 1):
        if (finish := rule.check(token, number)) is not None:
            raise RequestError(
                f"{_NAME} has {len(given)} tokens, and number {number} ends the text "
                f"({finish.reason}); it must go on"
            )
    sequence.token_ids.extend(given)
    if sequence.logprobs is not None:
        sequence.logprobs.extend([None] * len(given))
    if sequence.text is not None:
        before, sequence.text = sequence.text, sequence.text.advanced(given)
        if (match := find_stop(rule, before, sequence.text, len(given))) is not None:
            raise RequestError(f"{_NAME} has the stop string {match.string!r}; the text must go on")
    if request.output_kind is RequestOutputKind.DELTA:
        make_output(request)  # what they are is known to the caller
