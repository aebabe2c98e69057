"""``POST /api/embed``, and ``POST /api/embeddings``, which it has replaced."""

from dataclasses import dataclass
from typing import Any

from pagedserve.engine.stats import request_time
from pagedserve.server.chat.job import renamed_fields
from pagedserve.server.context import Context
from pagedserve.server.ollama.job import nanoseconds
from pagedserve.server.ollama.protocol import EmbedBody, PromptEmbeddingBody
from pagedserve.server.pooling.job import PoolingJob, Vectors, embedding_job
from pagedserve.server.pooling.protocol import EmbeddingBody


@dataclass(slots=True, kw_only=True)
class OllamaEmbeddingJob(PoolingJob):
    """An embedding request of Ollama's API.

    Attributes:
        asked_as: Field of the request with the texts: "input", or "prompt", which is a single one.
    """

    asked_as: str

    def _fields(self, vectors: Vectors) -> dict[str, Any]:
        embeddings = [vector.tolist() for vector in vectors]
        if self.asked_as == "prompt":
            return {"embedding": embeddings[0]}
        return {
            "model": self.model,
            "embeddings": embeddings,
            "total_duration": nanoseconds(request_time() - self.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": sum(self.usage.prompt_tokens.values()),
        }


async def embed_job(
    context: Context, body: EmbedBody | PromptEmbeddingBody, answer_id: str
) -> OllamaEmbeddingJob:
    """Validate an embedding request, and create its job.

    Raises:
        RequestError: Fields are invalid.
        ServerError: Unknown model, still loading, or a generative model.
    """
    await context.check_ready()
    embedding = EmbeddingBody(
        model=context.model_name(body.model),
        priority=body.priority,
        request_id=body.request_id,
        timeout=body.timeout,
        input=body.texts,
        dimensions=body.dimensions or None,
        use_activation=True,
        truncate_prompt_tokens=-1 if body.truncate else None,
    )
    embedding.arrived_with(body.num_bytes)
    asked_as = "input" if isinstance(body, EmbedBody) else "prompt"
    with renamed_fields({"input": asked_as}):
        job = await embedding_job(context, embedding, answer_id)
    request = job.same_request()
    return OllamaEmbeddingJob(
        **request, rules=job.rules, field=job.field, shape=job.shape, asked_as=asked_as
    )
