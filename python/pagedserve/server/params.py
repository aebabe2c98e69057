"""Conversion of a body to prompts and sampling parameters of the engine."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.inputs import Prompt, TextPrompt, TokensPrompt
from pagedserve.sampling_params import RequestOutputKind, SamplingParams
from pagedserve.sampling_params.checks import temperature, truncate_prompt_tokens
from pagedserve.sampling_params.options import PARAMETERS
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams
from pagedserve.server.chat.answer_reader import (
    check_text_of_tools,
    forced_by_choice,
    held_by_format,
)
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.http.bounds import MAX_PROMPTS, check_schema
from pagedserve.server.protocol import Body
from pagedserve.server.tools.formats import ToolFormat

# Parameters that a model's generation_config may set, if the body does not.
_RECOMMENDED: Final = [name for name, known in PARAMETERS.items() if known.recommended_as]
# Parameters that are fields.
_FIELDS: Final = [name for name, known in PARAMETERS.items() if known.request != "none"]
# Names of the fields of parameters that are named otherwise.
FIELD_NAMES: Final = {"extra_args": "vllm_xargs"}
# Fields of vLLM 0.6 to 0.9: guided_json, ...
_GUIDED: Final = ("json", "regex", "choice", "grammar", "json_object")
# Larger biases are clamped to it, as by OpenAI.
_MAX_BIAS: Final = 100.0
# Default max_tokens of a completion.
_DEFAULT_MAX_TOKENS: Final = 16


def completion_params(
    body: CompletionBody, default: SamplingParams, *, closes: bool = True
) -> SamplingParams:
    """Build the sampling parameters of a completion.

    Args:
        body: The request.
        default: Default sampling parameters of the model.
        closes: Whether objects of strict schemas have only the properties that these name.

    Raises:
        RequestError: Values are invalid, alone or together.
    """
    given = _common(body, default, closes=closes)
    given["max_tokens"] = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if given["max_tokens"] == 0:
        if not body.echo:
            raise RequestError(
                "max_tokens is 0; it must be at least 1, or echo must be true", param="max_tokens"
            )
        given["max_tokens"] = 1  # dropped again
    given["logprobs"] = body.logprobs
    given["prompt_logprobs"] = body.prompt_logprobs
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    return SamplingParams.from_optional(**given)


def chat_params(
    body: ChatBody,
    default: SamplingParams,
    *,
    tools: ToolFormat | None = None,
    token_ids: Collection[Sequence[int]] = (),
    shows_tags: bool = False,
    closes: bool = True,
) -> SamplingParams:
    """Build the sampling parameters of a chat completion.

    Args:
        body: The request.
        default: Default sampling parameters of the model.
        tools: Tool call format; None if it is unknown.
        token_ids: Token ids of the format's start tags that consist of added tokens.
        shows_tags: Whether to keep special tokens, whatever the request sets.
        closes: Whether objects of tools and strict schemas have only properties that these name.

    Raises:
        RequestError: Values are invalid, alone or together.
    """
    given = _common(body, default, closes=closes)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs is given with stream; it is for whole answers",
            param="prompt_logprobs",
        )
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    given["max_tokens"] = PARAMETERS["max_tokens"].check(field, getattr(body, field))
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "top_logprobs is given without logprobs; it needs logprobs true", param="top_logprobs"
        )
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    given["prompt_logprobs"] = body.prompt_logprobs
    if shows_tags:
        given["skip_special_tokens"] = False
    if (forced := forced_by_choice(body, tools, closes=closes)) is not None:
        text = given["structured_outputs"]
        if text is not None and text.given_as != "response_format":  # which a call does not have
            raise RequestError(
                "tool_choice requires a call, and another field says what the text must be",
                param="tool_choice",
            )
        given["structured_outputs"] = forced
    text = given["structured_outputs"]
    check_text_of_tools(body, text, tools)
    held = held_by_format(body, tools, text, token_ids=token_ids, closes=closes)
    given["structured_outputs"] = held or text
    return SamplingParams.from_optional(**given)


def listed_prompts(given: Any, name: str) -> list[Any]:
    """Return prompts as a list, each a text, token ids, or another form of the route.

    Args:
        given: One or a list.
        name: Name of the field.

    Raises:
        RequestError: No prompt, or too many.
    """
    is_single = isinstance(given, str) or (given and isinstance(given[0], int))
    listed: list[Any] = [given] if is_single else given
    if not 1 <= len(listed) <= MAX_PROMPTS:
        raise RequestError(
            f"{name} has {len(listed)} prompts; it must be from 1 to {MAX_PROMPTS}", param=name
        )
    return listed


def salted(prompt: TextPrompt | TokensPrompt, body: Body) -> Prompt:
    """Add the cache salt of a request to a prompt, if it has one."""
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    return prompt


def check_num_choices(body: Body, most: int) -> None:
    """Refuse more outputs than can run together, equal ones included.

    Raises:
        RequestError: ``n`` is above ``most``.
    """
    if body.n is not None and body.n > most:
        raise RequestError(f"n is {body.n}; max_num_seqs is {most}", param="n")


def num_equal_choices(body: Body, params: SamplingParams) -> int:
    """Number of equal choices per output: ``n`` for greedy sampling, else 1."""
    wants_several = body.n is not None and body.n > 1
    return body.n or 1 if wants_several and params.is_greedy else 1


def _structured_outputs(body: Body, *, closes: bool) -> StructuredOutputsParams | None:
    """Structured outputs of a request, whichever field sets them.

    Args:
        body: The request.
        closes: Whether objects of a strict schema have only the properties that it names.

    Raises:
        RequestError: Several fields set them differently, or ``response_format`` has no schema.
    """
    found: dict[str, dict[str, Any]] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    for name in _GUIDED:
        value = getattr(body, f"guided_{name}")
        if value is not None and value is not False:
            found[f"guided_{name}"] = {name: value}
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        schema = wanted.schema_
        found["response_format"] = {"json_object": True} if schema is None else {"json": schema}
    elif wanted is not None and wanted.type == "json_schema":
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        if schema is None:
            raise RequestError(
                "response_format.json_schema.schema is missing; it must be a JSON schema",
                param="response_format",
            )
        found["response_format"] = {"json": schema}
    for name, given in found.items():
        check_schema(name, given.get("json"), body.num_bytes)
    made = {
        name: StructuredOutputsParams(**given | {"given_as": name}) for name, given in found.items()
    }
    if len(set(made.values())) > 1:
        raise RequestError(
            f"{' and '.join(made)} are given and differ; at most one may say what the text must be",
            param=next(iter(made)),
        )
    if closes and wanted is not None and wanted.is_strict:
        strict = found["response_format"] | {"disable_additional_properties": True}
        return StructuredOutputsParams(**strict, given_as="response_format")
    return next(iter(made.values()), None)


def _common(body: Body, default: SamplingParams, *, closes: bool) -> dict[str, Any]:
    own = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    given = {name: getattr(default, name) for name in _RECOMMENDED}
    searches = own.get("use_beam_search", False)
    if searches:  # the model recommends them for sampling
        given |= {name: known.off[0] for name in _RECOMMENDED if (known := PARAMETERS[name]).off}
    given |= own
    given["n"] = body.n or 1
    is_greedy = temperature("temperature", given["temperature"]) == 0 or given["top_k"] == 1
    if is_greedy and not searches and own.get("best_of") in {None, body.n}:
        # All outputs would be equal: one is generated, and repeated.
        given |= {"n": 1, "best_of": None}
    if body.logit_bias is not None:
        given["logit_bias"] = {
            token: max(-_MAX_BIAS, min(_MAX_BIAS, bias)) for token, bias in body.logit_bias.items()
        }
    given["extra_args"] = body.vllm_xargs
    given["prediction"] = (body.prediction.text or None) if body.prediction is not None else None
    given["structured_outputs"] = _structured_outputs(body, closes=closes)
    if body.truncation_side == "right":  # truncated before the engine sees the prompt
        truncate_prompt_tokens("truncate_prompt_tokens", given.pop("truncate_prompt_tokens", None))
    given["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return given
