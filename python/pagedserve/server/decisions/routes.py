"""Route of typed decisions."""

from typing import Any

from fastapi import FastAPI, Request

from pagedserve.server.context import Context
from pagedserve.server.decisions.job import decision_job
from pagedserve.server.decisions.protocol import DecisionBody, DecisionResponse
from pagedserve.server.http.routing import JSON, answer_id, job_response, json_responses


def add_decisions(app: FastAPI, context: Context) -> None:
    """Add the route to an application."""

    @app.post("/v1/systemone", dependencies=JSON, responses=json_responses(DecisionResponse))
    async def systemone(body: DecisionBody, request: Request) -> Any:
        """Answer typed questions about a state, with probabilities."""
        named = answer_id("decision-", request, body.request_id)
        return job_response(await decision_job(context, body, named), request)
