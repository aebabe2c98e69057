"""Routes of pooling requests."""

from typing import Any

from fastapi import FastAPI, Request

from pagedserve.server.context import Context
from pagedserve.server.http.routing import JSON, answer_id, job_response, json_responses
from pagedserve.server.pooling.cohere import CohereBody, CohereResponse, embed_job
from pagedserve.server.pooling.job import (
    classification_job,
    embedding_job,
    pooling_job,
    rerank_job,
    score_job,
)
from pagedserve.server.pooling.protocol import (
    ClassificationBody,
    ClassificationResponse,
    EmbeddingBody,
    EmbeddingResponse,
    PoolingBody,
    PoolingResponse,
    RerankBody,
    RerankResponse,
    ScoreBody,
    ScoreResponse,
)


def add_pooling(app: FastAPI, context: Context) -> None:
    """Add the routes to an application."""

    @app.post("/v1/embeddings", responses=json_responses(EmbeddingResponse), dependencies=JSON)
    async def embeddings(body: EmbeddingBody, request: Request) -> Any:
        """Compute an embedding of each prompt."""
        named = answer_id("embd-", request, body.request_id)
        return job_response(await embedding_job(context, body, named), request)

    @app.post("/v2/embed", responses=json_responses(CohereResponse), dependencies=JSON)
    async def embed(body: CohereBody, request: Request) -> Any:
        """Compute an embedding of each text, in Cohere's form."""
        named = answer_id("embd-", request, body.request_id)
        return job_response(await embed_job(context, body, named), request)

    @app.post("/pooling", responses=json_responses(PoolingResponse), dependencies=JSON)
    async def pooling(body: PoolingBody, request: Request) -> Any:
        """Compute the pooled output of each prompt."""
        named = answer_id("pool-", request, body.request_id)
        return job_response(await pooling_job(context, body, named), request)

    @app.post("/classify", responses=json_responses(ClassificationResponse), dependencies=JSON)
    async def classify(body: ClassificationBody, request: Request) -> Any:
        """Compute the class probabilities of each prompt."""
        named = answer_id("classify-", request, body.request_id)
        return job_response(await classification_job(context, body, named), request)

    @app.post("/score", responses=json_responses(ScoreResponse), dependencies=JSON)
    @app.post("/v1/score", dependencies=JSON, include_in_schema=False)
    async def score(body: ScoreBody, request: Request) -> Any:
        """Score the similarity of texts."""
        named = answer_id("score-", request, body.request_id)
        return job_response(await score_job(context, body, named), request)

    @app.post("/rerank", responses=json_responses(RerankResponse), dependencies=JSON)
    @app.post("/v1/rerank", dependencies=JSON, include_in_schema=False)
    @app.post("/v2/rerank", dependencies=JSON, include_in_schema=False)
    async def rerank(body: RerankBody, request: Request) -> Any:
        """Rank documents by their relevance to a query."""
        named = answer_id("rerank-", request, body.request_id)
        return job_response(await rerank_job(context, body, named), request)
