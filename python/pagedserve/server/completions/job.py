"""``POST /v1/completions``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any

from pagedserve.errors import RequestError
from pagedserve.inputs import Prompt, TextPrompt, TokensPrompt
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.completions.infill import check_infill
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.context import Context
from pagedserve.server.http.bounds import MAX_PROMPT_LOGPROBS
from pagedserve.server.job import GenerationJob, num_shown
from pagedserve.server.limits import guessed_num_tokens
from pagedserve.server.logprobs import (
    Entry,
    TextOffsets,
    TokenNames,
    completion_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from pagedserve.server.params import (
    FIELD_NAMES,
    check_num_choices,
    completion_params,
    listed_prompts,
    num_equal_choices,
    salted,
)


async def completion_job(context: Context, body: CompletionBody, answer_id: str) -> GenerationJob:
    """Validate a completion, and create its job.

    Raises:
        RequestError: Fields are invalid.
        ServerError: Unknown model, or the model is still loading.
    """
    model = await context.model_for(body)
    check_num_choices(body, context.admission.max_num_seqs)
    context.text.check_prediction(body)
    default, closes = context.default_params.result(), context.args.close_schemas
    make_params = partial(completion_params, body, default, closes=closes)
    params = await context.for_body(make_params, num_bytes=body.num_bytes)
    prompts = listed_prompts(body.prompt, "prompt")
    if body.suffix:
        check_infill(body)
        prompts = await context.text.infilled(prompts, body.suffix)
    prompt_sizes = [
        guessed_num_tokens(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts
    ]
    _check_prompt_logprobs(body, params, sum(prompt_sizes))
    detokenizer = await context.text.detokenizer(skip_special_tokens=not body.shows_special_tokens)
    return GenerationJob(
        context=context,
        body=body,
        params=params,
        prompt_sizes=prompt_sizes,
        make_prompts=partial(_made, context, body, prompts),
        choices=CompletionChoices(
            body,
            TokenNames(detokenizer, body.return_tokens_as_token_ids),
            await context.text.detokenizer(skip_special_tokens=False),
        ),
        answer_id=answer_id,
        model=model,
        lora_request=context.adapters.get(model),
        num_equal=num_equal_choices(body, params),
    )


def _check_prompt_logprobs(body: CompletionBody, params: SamplingParams, num_tokens: int) -> None:
    """Refuse a completion whose choices would repeat too many log-probabilities of its prompts.

    Raises:
        RequestError: They are more than ``MAX_PROMPT_LOGPROBS``.
    """
    number = (body.n or 1) * num_tokens * num_shown(params.prompt_logprobs)
    if number > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"n is {body.n or 1}: the choices have about {number} log-probabilities of prompt "
            f"tokens; at most {MAX_PROMPT_LOGPROBS} are accepted",
            param="n",
        )


async def _made(
    context: Context, body: CompletionBody, given: list[str | list[int]]
) -> list[Prompt]:
    prompts: list[Prompt] = []
    for prompt in given:
        if not isinstance(prompt, str):
            tokens = TokensPrompt(prompt_token_ids=context.text.truncated(prompt, body))
            prompts.append(salted(tokens, body))
        elif body.add_special_tokens and body.truncation_side == "left":
            context.text.check_length(prompt, "the prompt")
            prompts.append(salted(TextPrompt(prompt=prompt), body))
        else:
            ids = await context.text.encode(prompt, add_special_tokens=body.add_special_tokens)
            tokens = TokensPrompt(prompt=prompt, prompt_token_ids=context.text.truncated(ids, body))
            prompts.append(salted(tokens, body))
    return prompts


@dataclass(slots=True)
class CompletionChoices:
    """Format of completion choices; see ``Choices``.

    Attributes:
        body: The request.
        names: Format of tokens.
        detokenizer: Detokenizer that keeps special tokens, since the prompt may contain some.
    """

    body: CompletionBody
    names: TokenNames
    detokenizer: Detokenizer
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    prompt_field: str = "prompt"
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    @property
    def field_names(self) -> Mapping[str, str]:  # noqa: D102
        return FIELD_NAMES

    def opening(self, index: int) -> None:  # noqa: D102
        del index

    def plain_delta(self, index: int, completion: CompletionOutput) -> str | None:  # noqa: D102
        body = self.body
        if (
            completion.logprobs is not None
            or completion.finish_reason is not None
            or body.echo
            or body.return_token_ids
            or body.prompt_logprobs is not None
        ):
            return None
        return (
            f'{{"index":{index},"text":{encode_basestring_ascii(completion.text)},'
            '"logprobs":null,"finish_reason":null,"stop_reason":null}'
        )

    def deltas(  # noqa: D102
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        is_first = index not in self._begun
        self._begun.add(index)
        return [self._choice(index, output, completion, is_first=is_first)]

    def whole(  # noqa: D102
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        return self._choice(index, output, completion, is_first=True)

    def of_answer(self, output: RequestOutput) -> dict[str, Any]:  # noqa: D102
        del output
        return {}

    def _choice(
        self,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        body, finish, stop_reason = self.body, completion.finish_reason, completion.stop_reason
        text, token_ids, entries = completion.text, completion.token_ids, completion.logprobs
        if body.max_tokens == 0:  # the engine generates one anyway
            text, token_ids, entries = "", [], entries and []
            finish, stop_reason = finish and "length", None
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._logprobs(index, token_ids, entries or ())
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": stop_reason,
        }
        if body.echo and is_first:
            self._echo(choice, output)
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return choice

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[Entry]
    ) -> dict[str, Any]:
        known = completion_logprobs(self.names, self.body.logprobs or 0, token_ids, entries)
        offsets = self._offsets.setdefault(index, TextOffsets(self.names.detokenizer.stream()))
        return {**known, "text_offset": offsets.take(token_ids)}

    def _echo(self, choice: dict[str, Any], output: RequestOutput) -> None:
        """Prepend the prompt to a choice."""
        token_ids = output.prompt_token_ids
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            text, detokenizer = output.prompt, self.detokenizer
        else:
            detokenizer = self.names.detokenizer
            text = detokenizer.decode(token_ids)
        choice["text"] = text + choice["text"]
        new = choice["logprobs"]
        if new is None:
            return
        entries = output.prompt_logprobs or ()
        shown = completion_logprobs(self.names, self.body.logprobs or 0, token_ids, entries)
        shown["text_offset"] = prompt_offsets(detokenizer, token_ids, text)
        self._offsets[choice["index"]].num_chars += len(text)
        new["text_offset"] = [offset + len(text) for offset in new["text_offset"]]
        choice["logprobs"] = {name: [*shown[name], *new[name]] for name in shown}
