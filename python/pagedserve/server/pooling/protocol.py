"""Requests and responses of the pooling routes."""

from typing import ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from pagedserve.server.fields import NullsLeftOut, Prompts
from pagedserve.server.protocol import ABSENT, HARMLESS, TemplatedBody, TextBody, UsageInfo


class PooledBody(TextBody):
    """Fields of all requests; the first tokens of a truncated text are kept."""

    absent: ClassVar[dict[str, tuple[object, ...]]] = ABSENT | {
        "truncation_side": ("right",),
        "encoding_format": ("float",),
        "stream": (False,),
        "truncate": ("NONE",),  # of NVIDIA
        "padding": ("do_not_pad",),  # of vLLM, as the next two
        "max_tokens_per_doc": (0,),
        "max_tokens_per_query": (0,),
        "late_chunking": (False,),  # of Jina
        "modality": ("text",),  # of Infinity, as the next
        "raw_scores": (False,),
    }

    use_activation: bool | None = Field(
        default=None, validation_alias=AliasChoices("use_activation", "normalize")
    )


class InputBody(PooledBody, TemplatedBody):
    """Fields of requests with prompts, or with a conversation in ``messages``."""

    input: Prompts | None = None
    add_generation_prompt: bool = False
    add_special_tokens: bool | None = Field(
        default=None, description="By default true of input, false of messages."
    )


class VectorBody(InputBody):
    """Fields of requests for vectors."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, description="0 is all.")
    prompt_name: str | None = None


class EmbeddingBody(VectorBody):
    """``POST /v1/embeddings``."""

    # Of Cohere and NVIDIA, and of Jina: what a vector is for, which vLLM does not read either.
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"input_type", "task"}


class PoolingBody(VectorBody):
    """``POST /pooling``."""

    task: Literal["embed", "classify"] | None = None


class ClassificationBody(InputBody):
    """``POST /classify``."""


class ScoreBody(PooledBody):
    """``POST /score``; vLLM has several names of each field."""

    text_1: str | list[str] = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | list[str] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2")
    )


class Document(NullsLeftOut):
    """A document to rank."""

    model_config = ConfigDict(extra="ignore")

    text: str


class DocumentPart(NullsLeftOut):
    """A part of a document."""

    type: Literal["text"]
    text: str


class DocumentOfParts(NullsLeftOut):
    """A document to rank, as Dify sends it where it expects images."""

    content: list[DocumentPart]

    @property
    def text(self) -> str:
        """Its parts, a line each."""
        return "\n".join(part.text for part in self.content)


class RerankBody(PooledBody):
    """``POST /rerank``, as clients of Jina and Cohere send it."""

    # Of Xinference, and of Dify, which itself filters the results.
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"return_len", "score_threshold"}

    query: str
    documents: list[str | Document | DocumentOfParts]
    top_n: int | None = Field(default=None, ge=0)  # vLLM's default is 0, for all
    return_documents: bool = True


class PooledResponse(BaseModel):
    """Fields of all responses."""

    id: str
    created: int
    model: str
    usage: UsageInfo


class Embedding(BaseModel):
    """Embedding of a prompt: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingResponse(PooledResponse):
    """Response of ``POST /v1/embeddings``."""

    object: Literal["list"]
    data: list[Embedding]


class PooledOutput(BaseModel):
    """PooledOutput output of a prompt, as an ``Embedding``."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingResponse(PooledResponse):
    """Response of ``POST /pooling``."""

    object: Literal["list"]
    data: list[PooledOutput]


class Classification(BaseModel):
    """Probabilities of a prompt's classes, and the name of the most likely."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PooledResponse):
    """Response of ``POST /classify``."""

    object: Literal["list"]
    data: list[Classification]


class PairScore(BaseModel):
    """Score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(PooledResponse):
    """Response of ``POST /score``."""

    object: Literal["list"]
    data: list[PairScore]


class RankedDocument(BaseModel):
    """A document, by its index in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(PooledResponse):
    """Response of ``POST /rerank``, the most relevant document first."""

    results: list[RankedDocument]
