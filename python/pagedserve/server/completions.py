"""``POST /v1/completions``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any

from pagedserve.inputs import Prompt, TextPrompt, TokensPrompt
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.server.context import Context
from pagedserve.server.errors import ServerError
from pagedserve.server.job import Job
from pagedserve.server.logprobs import (
    CompletionLogprobs,
    Entry,
    TokenNames,
    prompt_logprobs,
)
from pagedserve.server.params import (
    check_num_choices,
    completion_params,
    num_equal_choices,
    salted,
)
from pagedserve.server.protocol import CompletionBody

# Prompts of one request.
MAX_PROMPTS = 1024


async def completion_job(context: Context, body: CompletionBody, answer_id: str) -> Job:
    """Check a completion.

    Raises:
        RequestError: Fields that cannot be.
        ServerError: Another model, or no model yet.
    """
    await context.check_ready()
    model = context.model_name(body.model)
    body.check_fields(allows_unknown=context.args.allow_unknown_fields)
    check_num_choices(body, context.admission.max_num_seqs)
    params = completion_params(body, context.default_params.result())
    prompts = _listed(body)
    names = TokenNames(await context.detokenizer(), body.return_tokens_as_token_ids)
    return Job(
        context=context,
        body=body,
        params=params,
        num_prompts=len(prompts),
        make_prompts=partial(_made, context, body, prompts),
        choices=CompletionChoices(body, names),
        answer_id=answer_id,
        model=model,
        num_equal=num_equal_choices(body, params),
    )


def _listed(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, each a text or token ids."""
    given: Any = body.prompt
    is_single = isinstance(given, str) or (given and isinstance(given[0], int))
    listed: list[str | list[int]] = [given] if is_single else given
    if not 1 <= len(listed) <= MAX_PROMPTS:
        text = f"prompt has {len(listed)} prompts; it must be from 1 to {MAX_PROMPTS}"
        raise ServerError(400, text, param="prompt")
    return listed


async def _made(
    context: Context, body: CompletionBody, given: list[str | list[int]]
) -> list[Prompt]:
    prompts: list[Prompt] = []
    for prompt in given:
        if isinstance(prompt, str) and body.add_special_tokens:
            context.check_length(prompt, "the prompt")
            prompts.append(salted(TextPrompt(prompt=prompt), body))
            continue
        if isinstance(prompt, str):
            prompt = await context.encode(prompt, add_special_tokens=False)  # noqa: PLW2901
        prompts.append(salted(TokensPrompt(prompt_token_ids=prompt), body))
    return prompts


@dataclass(slots=True)
class CompletionChoices:
    """How the choices of completions look; see ``Choices``."""

    body: CompletionBody
    names: TokenNames
    kind: str = "text_completion"
    chunk_kind: str = "text_completion"
    _logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    def opening(self, index: int) -> None:  # noqa: D102
        del index

    def is_plain(self, completion: CompletionOutput) -> bool:  # noqa: D102
        body = self.body
        asks_more = body.echo or body.return_token_ids or body.prompt_logprobs is not None
        return not asks_more and completion.logprobs is None and completion.finish_reason is None

    def plain_delta(self, index: int, text: str) -> str:  # noqa: D102
        return (
            f'{{"index":{index},"text":{encode_basestring_ascii(text)},'
            '"logprobs":null,"finish_reason":null,"stop_reason":null}'
        )

    def delta(  # noqa: D102
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        is_first = index not in self._begun
        self._begun.add(index)
        return self._choice(index, output, completion, is_first=is_first)

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
        body = self.body
        text, token_ids = completion.text, completion.token_ids
        entries: Sequence[Entry] = completion.logprobs or ()
        finish = completion.finish_reason
        if body.max_tokens == 0:  # one was made all the same
            text, token_ids, entries = "", [], ()
            finish = finish and "length"
        if body.echo and is_first:
            prompt_ids = output.prompt_token_ids
            text = self._prompt_text(output) + text
            token_ids = [*prompt_ids, *token_ids]
            entries = [*(output.prompt_logprobs or ()), *entries]
        logprobs = None
        if body.logprobs is not None:
            known = self._logprobs.setdefault(index, CompletionLogprobs(self.names, body.logprobs))
            logprobs = known.shown(token_ids, entries)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": completion.stop_reason,
        }
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.body.truncate_prompt_tokens is None:
            return output.prompt
        return self.names.detokenizer.decode(output.prompt_token_ids)
