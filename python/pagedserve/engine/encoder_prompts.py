"""Prompts of encoder-decoders: what the encoder reads, and what the decoder goes on from."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pagedserve._core import SchedulerOutputs
from pagedserve.engine.request import RequestTable
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import Executor, ModelInfo
from pagedserve.images import TEXT_ALONE
from pagedserve.inputs import ParsedPrompt, TokenizedPrompt, tokenize_prompt
from pagedserve.models.encoder_prompts import EncoderDecoder


def split_prompt(
    prompt: ParsedPrompt, model: ModelInfo, name: str, encode: Callable[[str], list[int]]
) -> tuple[ParsedPrompt, TokenizedPrompt | None]:
    """The decoder's prompt, and the tokens of the encoder's; None where there is no encoder.

    Raises:
        RequestError: A prompt for an encoder that the model does not have, or one too long.
    """
    known = model.encoder_decoder
    if known is None:
        if prompt.encoder is not None:
            raise RequestError(
                f"{name} has an encoder_prompt, and the model has no encoder that reads it: give "
                "one prompt"
            )
        return prompt, None
    encoder = prompt if prompt.encoder is None else prompt.encoder
    if prompt.images or encoder.images:
        raise RequestError(f"{name} has images, and {TEXT_ALONE}")
    read = tokenize_prompt(encoder, name, encode=encode, vocab_size=model.vocab_size)
    if len(read.token_ids) > known.max_encoder_len:
        raise RequestError(
            f"{name} has {len(read.token_ids)} tokens for the encoder; it takes at most "
            f"{known.max_encoder_len}"
        )
    if prompt.encoder is None or (prompt.text is None and prompt.token_ids is None):
        return replace(prompt, token_ids=known.decoder_prompt), read
    given = tokenize_prompt(prompt, name, encode=encode, vocab_size=model.vocab_size).token_ids
    return replace(prompt, token_ids=_started(given, known)), read


def _started(token_ids: list[int], known: EncoderDecoder) -> list[int]:
    """A decoder's prompt, behind the token that all of them start with."""
    start = known.decoder_prompt[0]
    return token_ids if token_ids[0] == start else [start, *token_ids]


def encode_prompts(executor: Executor, requests: RequestTable, scheduled: SchedulerOutputs) -> None:
    """Have the encoder's states for the requests that begin in a step, which is in the buffers.

    A request begins where the first token of a row of it is computed: once, and again after a
    preemption by recompute.  Its rows have one encoder, so the first of them stands for all.
    """
    buffers = executor.buffers
    starts = buffers.query_start[: scheduled.num_rows]
    rows = (buffers.positions[starts] == 0).nonzero()[0]
    sequences = requests.by_handles(buffers.row_handles[rows].tolist())
    beginning: dict[int, tuple[int, Sequence[int]]] = {}
    for row, sequence in zip(rows.tolist(), sequences, strict=True):
        read = sequence.request.encoder_prompt_token_ids or ()
        beginning.setdefault(sequence.request.group, (row, read))
    executor.encode_prompts(dict(beginning.values()))
