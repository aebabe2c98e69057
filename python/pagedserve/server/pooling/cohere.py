"""Embeddings in Cohere's form: ``/v2/embed``, for texts."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from pagedserve.errors import RequestError
from pagedserve.pooling.rules import PoolingRules
from pagedserve.pooling_params import PoolingParams
from pagedserve.server.context import Context
from pagedserve.server.params import listed_prompts
from pagedserve.server.pooling.job import PoolingJob, Vectors, encoded, pooled_job
from pagedserve.server.pooling.protocol import DocumentOfParts, PooledBody, PooledResponse

EmbeddingType: TypeAlias = Literal["float", "base64", "binary", "ubinary"]
Numbers: TypeAlias = list[list[float]]

# Names of a model's prompts by Cohere's names of what a vector is for, in order of preference.
_PROMPT_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
}


class CohereBody(PooledBody):
    """``POST /v2/embed``."""

    texts: list[str] | None = None
    inputs: list[DocumentOfParts] | None = Field(default=None, description="Texts in parts.")
    input_type: str | None = Field(
        default=None,
        description="Name of the model's prompt that is prepended, or search_query or "
        "search_document; without effect if the model has none of these names.",
    )
    embedding_types: list[EmbeddingType] = Field(default=["float"], min_length=1)
    output_dimension: int | None = None
    truncate: Literal["NONE", "END"] = Field(
        default="END", description="END keeps the first tokens of a text that is too long."
    )
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens that END keeps.")

    def prompt_name(self, rules: PoolingRules) -> str | None:
        """Name of the model's prompt that is prepended; None is the default."""
        kind = self.input_type or ""
        names = (kind, *_PROMPT_NAMES.get(kind, ()))
        return next((name for name in names if name in rules.prompts), None)

    def num_kept_tokens(self, max_model_len: int) -> int | None:
        """Tokens that are kept of a text, -1 for as many as the model accepts; None for all.

        Raises:
            RequestError: Fields that contradict each other.
        """
        if self.truncate_prompt_tokens is not None:
            return self.truncate_prompt_tokens
        if self.truncate == "END":
            is_less = self.max_tokens is not None and self.max_tokens < max_model_len
            return self.max_tokens if is_less else -1
        if self.max_tokens is not None:
            raise RequestError("max_tokens is given with truncate NONE", param="max_tokens")
        return None

    def params(self, rules: PoolingRules, max_model_len: int) -> PoolingParams:
        """Parameters of all its prompts.

        Raises:
            RequestError: Fields that contradict each other.
        """
        return PoolingParams(
            truncate_prompt_tokens=self.num_kept_tokens(max_model_len),
            use_activation=self.use_activation,
            dimensions=self.output_dimension or None,
            prompt_name=self.prompt_name(rules),
        )

    def listed_texts(self) -> list[str]:
        """Texts to embed, at least one.

        Raises:
            RequestError: Neither ``texts`` nor ``inputs``, or both.
        """
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("give either texts or inputs", param="texts")
        return self.texts or [entry.text for entry in self.inputs or ()]


class EmbeddingsByType(BaseModel):
    """Embeddings of all texts, of each type that was requested."""

    float: Numbers | None = None
    base64: list[str] | None = Field(default=None, description="Little-endian float32.")
    binary: list[list[int]] | None = Field(
        default=None, description="Signs, 8 in a byte, the first the highest; 128 less."
    )
    ubinary: list[list[int]] | None = None


class ApiVersion(BaseModel):
    """Version of Cohere's API."""

    version: Literal["2"]


class BilledUnits(BaseModel):
    """Tokens of all texts."""

    input_tokens: int


class EmbedMeta(BaseModel):
    """What Cohere's clients read of a request."""

    api_version: ApiVersion
    billed_units: BilledUnits


class CohereResponse(PooledResponse):
    """Response of ``POST /v2/embed``."""

    embeddings: EmbeddingsByType
    texts: list[str]
    meta: EmbedMeta
    response_type: Literal["embeddings_by_type"]


async def embed_job(context: Context, body: CohereBody, answer_id: str) -> PoolingJob:
    """Validate a request for embeddings, as ``embedding_job``."""
    await context.check_ready()
    texts = body.listed_texts()
    rules = await context.pooling_rules()

    def shape(vectors: Vectors) -> Mapping[str, Any]:
        num_tokens = sum(job.usage.prompt_tokens.values())
        return {
            "embeddings": {
                kind: [_TYPES[kind](vector) for vector in vectors] for kind in body.embedding_types
            },
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
            "response_type": "embeddings_by_type",
        }

    job = await pooled_job(
        context,
        body,
        answer_id,
        task="embed",
        params=body.params(rules, context.text.max_model_len),
        prompts=listed_prompts(texts, "texts"),
        field="texts" if body.inputs is None else "inputs",
        shape=shape,
    )
    return job


def _signs(vector: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.packbits(vector >= 0)


_TYPES: Final[dict[EmbeddingType, Callable[[NDArray[np.float64]], Any]]] = {
    "float": lambda vector: encoded(vector, "float"),
    "base64": lambda vector: encoded(vector, "base64"),
    "binary": lambda vector: (_signs(vector).astype(int) - 128).tolist(),
    "ubinary": lambda vector: _signs(vector).tolist(),
}
