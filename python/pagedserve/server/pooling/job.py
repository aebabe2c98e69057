"""Pooling requests: ``/v1/embeddings``, ``/pooling``, ``/classify``, ``/score``, ``/rerank``.

Those of ``/v2/embed`` are in ``cohere``.

The engine returns one vector per prompt; the response is built once all have arrived.
"""

import base64
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError
from pagedserve.inputs import Prompt, TextPrompt, TokensPrompt
from pagedserve.output.pooling import cosine, finished_vector, match_pairs
from pagedserve.outputs import FinishReason, RequestOutput
from pagedserve.pooling.rules import PoolingRules
from pagedserve.pooling_params import PoolingParams, PoolingTask
from pagedserve.server.context import Context
from pagedserve.server.fields import check_conversation
from pagedserve.server.generation import check_end
from pagedserve.server.http.errors import ServerError
from pagedserve.server.job import Job, Progress
from pagedserve.server.limits import guessed_num_chat_tokens, guessed_num_tokens
from pagedserve.server.params import listed_prompts
from pagedserve.server.pooling.protocol import (
    ClassificationBody,
    EmbeddingBody,
    InputBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    VectorBody,
)

# A text, token ids, two texts, or the request with a conversation.
GivenPrompt: TypeAlias = str | list[int] | tuple[str, str] | InputBody
Vectors: TypeAlias = Sequence[NDArray[np.float64]]
# Fields of a response besides its id, model and usage.
Shape: TypeAlias = Callable[[Vectors], Mapping[str, Any]]

# Approximate bytes of a number in a response.
_NUMBER_BYTES: Final = 20


@dataclass(slots=True, kw_only=True)
class PoolingJob(Job):
    """A pooling request.

    Attributes:
        rules: Pooling configuration of the model.
        field: Name of the field with the prompts.
        shape: Builds the response from the vectors of its prompts.
    """

    params: PoolingParams
    rules: PoolingRules
    field: str
    shape: Shape

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompts."""
        return self.field

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """The single chunk of its response."""
        vectors: dict[int, NDArray[np.float64]] = {}
        async with aclosing(self.outputs()) as outputs:
            async for place, output in outputs:
                if output.pooled is None:
                    raise ServerError(503, "the request was aborted before it was answered")
                vectors[place] = finished_vector(output.pooled, self.rules, self.params)
        ordered = [vectors[place] for place in range(self.num_prompts)]
        num_bytes = _NUMBER_BYTES * sum(vector.size for vector in ordered)
        yield await self.context.for_body(partial(self._text, ordered), num_bytes=num_bytes)

    def _text(self, vectors: Vectors) -> bytes:
        """Whole response; serialized entry by entry, since one call would hold up other threads."""
        return _serialized(self._fields(vectors)).encode()

    def _fields(self, vectors: Vectors) -> dict[str, Any]:
        """Fields of the whole response."""
        head = {"id": self.answer_id, "created": self.created, "model": self.model}
        return {**head, **self.shape(vectors), "usage": self._shown_usage()}

    def _count(self, place: int, output: RequestOutput) -> None:
        check_end(output.outputs[0], is_begun=False)
        self.usage.count_prompt(place, output)
        self.last[place] = output
        self.progress[place] = Progress(time.monotonic())
        reason: FinishReason = "abort" if output.pooled is None else "stop"
        self.finishes.append(reason)
        self.context.metrics.prompt_pooled(output, reason)


async def embedding_job(context: Context, body: EmbeddingBody, answer_id: str) -> PoolingJob:
    """Validate an embedding request, and create its job.

    Raises:
        RequestError: Fields are invalid.
        ServerError: Unknown model, still loading, or a generative model.
    """
    return await _listed_job(context, body, answer_id, "embedding")


async def pooling_job(context: Context, body: PoolingBody, answer_id: str) -> PoolingJob:
    """Validate a pooling request, as ``embedding_job``."""
    return await _listed_job(context, body, answer_id, "data", task=body.task)


async def _listed_job(
    context: Context,
    body: VectorBody,
    answer_id: str,
    field: str,
    task: PoolingTask | None = None,
) -> PoolingJob:
    """Create a job with one vector per prompt, in a field of that name."""
    kind = "embedding" if field == "embedding" else "pooling"
    if body.messages is not None and body.prompt_name is not None:
        text = "prompt_name is given with messages; it needs input"
        raise RequestError(text, param="prompt_name")

    def shape(vectors: Vectors) -> Mapping[str, Any]:
        data = [
            {"index": place, "object": kind, field: encoded(vector, body.encoding_format)}
            for place, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data}

    return await pooled_job(
        context,
        body,
        answer_id,
        task="embed" if field == "embedding" else "encode",
        params=_params(
            body, prompt_name=body.prompt_name, dimensions=body.dimensions or None, task=task
        ),
        prompts=_given(body),
        field="input" if body.messages is None else "messages",
        shape=shape,
    )


async def classification_job(
    context: Context, body: ClassificationBody, answer_id: str
) -> PoolingJob:
    """Validate a classification request, as ``embedding_job``."""

    def shape(vectors: Vectors) -> Mapping[str, Any]:
        classes = job.rules.classes
        labels = () if classes is None else classes.labels
        data = [
            {
                "index": place,
                "label": labels[int(vector.argmax())],
                "probs": vector.tolist(),
                "num_classes": len(vector),
            }
            for place, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data}

    job = await pooled_job(
        context,
        body,
        answer_id,
        task="classify",
        params=_params(body),
        prompts=_given(body),
        field="input" if body.messages is None else "messages",
        shape=shape,
    )
    return job


async def score_job(context: Context, body: ScoreBody, answer_id: str) -> PoolingJob:
    """Validate a scoring request, as ``embedding_job``."""
    pairs = match_pairs("text_1", body.text_1, body.text_2)

    def shape(scores: Sequence[float]) -> Mapping[str, Any]:
        data = [
            {"index": place, "object": "score", "score": score}
            for place, score in enumerate(scores)
        ]
        return {"object": "list", "data": data}

    return await _scored(context, body, answer_id, pairs=pairs, field="text_2", shape=shape)


async def rerank_job(context: Context, body: RerankBody, answer_id: str) -> PoolingJob:
    """Validate a rerank request, as ``embedding_job``."""
    texts = [text if isinstance(text, str) else text.text for text in body.documents]

    def shape(scores: Sequence[float]) -> Mapping[str, Any]:
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        return {"results": [result(place, scores[place]) for place in order[: body.top_n or None]]}

    def result(place: int, score: float) -> Mapping[str, Any]:
        document = {"document": {"text": texts[place]}} if body.return_documents else {}
        return {"index": place, "relevance_score": score, **document}

    pairs = match_pairs("query", [body.query], texts)
    return await _scored(context, body, answer_id, pairs=pairs, field="documents", shape=shape)


def _given(body: InputBody) -> Sequence[GivenPrompt]:
    """Prompts of a request.

    Raises:
        RequestError: Neither ``input`` nor ``messages``, both, or invalid ones.
    """
    if (body.input is None) == (body.messages is None):
        raise RequestError("give either input or messages", param="input")
    if body.messages is not None:
        check_conversation(body.messages)
        return [body]
    if body.add_special_tokens is False:
        raise RequestError(
            "add_special_tokens is False with input; it must be True or left out",
            param="add_special_tokens",
        )
    return listed_prompts(body.input, "input")


async def _scored(
    context: Context,
    body: PooledBody,
    answer_id: str,
    *,
    pairs: Sequence[tuple[str, str]],
    field: str,
    shape: Callable[[Sequence[float]], Mapping[str, Any]],
) -> PoolingJob:
    """Score pairs with a cross-encoder; else embed each text once, however many pairs it is in."""
    await context.check_ready()
    listed_prompts(pairs, field)
    takes_pairs = (await context.pooling_rules()).takes_pairs
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    places = {text: place for place, text in enumerate(texts)}

    def scores(vectors: Vectors) -> list[float]:
        if takes_pairs:
            return [float(vector[0]) for vector in vectors]
        return [cosine(vectors[places[left]], vectors[places[right]]) for left, right in pairs]

    return await pooled_job(
        context,
        body,
        answer_id,
        task="score",
        params=_params(body),
        prompts=pairs if takes_pairs else texts,
        field=field,
        shape=lambda vectors: shape(scores(vectors)),
    )


def _params(body: PooledBody, **asked: Any) -> PoolingParams:
    return PoolingParams(
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        use_activation=body.use_activation,
        **asked,
    )


async def pooled_job(
    context: Context,
    body: PooledBody,
    answer_id: str,
    *,
    task: PoolingTask,
    params: PoolingParams,
    prompts: Sequence[GivenPrompt],
    field: str,
    shape: Shape,
) -> PoolingJob:
    """Validate what all pooling requests have, and create a job; see ``embedding_job``."""
    await context.check_ready()
    model = context.model_name(body.model)
    rules = await context.pooling_rules()
    body.check_fields(allows_unknown=context.args.allow_unknown_fields)
    rules.check_task(task)
    rules.check(params)
    return PoolingJob(
        context=context,
        body=body,
        params=params,
        prompt_sizes=[_size(prompt) for prompt in prompts],
        make_prompts=partial(_made, context, params, prompts),
        answer_id=answer_id,
        model=model,
        lora_request=None,
        rules=rules,
        field=field,
        shape=shape,
    )


def _size(prompt: GivenPrompt) -> int:
    """Approximate number of tokens."""
    if isinstance(prompt, InputBody):
        return guessed_num_chat_tokens(prompt.messages or ())
    if isinstance(prompt, list):
        return len(prompt)
    return guessed_num_tokens(prompt if isinstance(prompt, str) else "".join(prompt))


async def _made(
    context: Context, params: PoolingParams, given: Sequence[GivenPrompt]
) -> list[Prompt]:
    most = params.truncate_prompt_tokens

    async def worthwhile(text: str) -> str:
        if most is not None:  # the rest is truncated anyway
            return await context.text.prefix(text, context.text.max_model_len if most < 0 else most)
        context.text.check_length(text, "the prompt")
        return text

    prompts: list[Prompt] = []
    for prompt in given:
        if isinstance(prompt, list):
            prompts.append(TokensPrompt(prompt_token_ids=prompt))
        elif isinstance(prompt, str):
            prompts.append(TextPrompt(prompt=await worthwhile(prompt)))
        elif isinstance(prompt, InputBody):
            prompts.append(await _rendered(context, prompt))
        else:
            first, second = [await worthwhile(text) for text in prompt]
            prompts.append(TextPrompt(prompt=first, text_pair=second))
    return prompts


async def _rendered(context: Context, body: InputBody) -> Prompt:
    """Render a conversation, to which the chat template adds the special tokens by default."""
    prompt = await context.text.chat_prompt(body)
    if body.add_special_tokens:
        text = prompt.get("prompt") or ""
        prompt["prompt_token_ids"] = await context.text.encode(text, add_special_tokens=True)
    return prompt


def _serialized(value: object) -> str:
    """Serialize a field as JSON, and lists entry by entry."""
    if isinstance(value, dict):
        members = (f"{json.dumps(name)}: {_serialized(item)}" for name, item in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(json.dumps, value))}]"
    return json.dumps(value)


def encoded(vector: NDArray[np.float64], encoding: str) -> str | list[float]:
    """Encode a vector as numbers, or as base64 of little-endian float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
