"""OpenTelemetry: one span per request, created at its end; no cost per token.

Attributes have vLLM's names; users' texts are never included.
"""

import os
import threading
import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pagedserve.engine.clock import request_time
from pagedserve.server.errors import ServerError, scrubbed
from pagedserve.server.job import Job, TokenJob

_PARENT: Final = TraceContextTextMapPropagator()
# Seconds at shutdown for the collector to accept the last spans.
_FLUSH_SECONDS: Final = 2.0
_FAILURES: Final = 500


class Tracer:
    """Sends spans to a collector, from a separate thread."""

    def __init__(self, endpoint: str) -> None:
        """Start to send.

        Args:
            endpoint: URL that accepts OTLP over HTTP.
        """
        name = os.environ.get("OTEL_SERVICE_NAME", "pagedserve")
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint))
        provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("pagedserve")

    def request_ended(
        self, job: Job, headers: Mapping[str, str], error: ServerError | None
    ) -> None:
        """Create the span of a request that has finished, was refused or was cancelled.

        Args:
            job: The request.
            headers: Request headers; ``traceparent`` names the parent span.
            error: Error that was sent to the client.
        """
        ended, seconds = time.time(), request_time() - job.arrival_time
        span = self._tracer.start_span(
            "llm_request",
            context=_PARENT.extract(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(job, seconds),
            start_time=_nanoseconds(ended - seconds),
        )
        if error is not None:
            span.set_attribute("http.response.status_code", error.status)
            if error.status >= _FAILURES:
                span.set_status(Status(StatusCode.ERROR, scrubbed(error.message)))
        span.end(_nanoseconds(ended))

    def shutdown(self) -> None:
        """Send remaining spans; a collector that does not respond delays it only briefly."""
        flushing = threading.Thread(target=self._processor.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)


def _attributes(job: Job, seconds: float) -> dict[str, AttributeValue]:
    usage = job.usage
    found: dict[str, AttributeValue | None] = {
        "gen_ai.request.id": job.answer_id,
        "gen_ai.response.model": job.model,
        **(_asked(job) if isinstance(job, TokenJob) else {}),
        "gen_ai.usage.num_sequences": job.num_seqs,
        "gen_ai.usage.prompt_tokens": sum(usage.prompt_tokens.values()),
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": job.finishes or None,
        "gen_ai.latency.e2e": seconds,
        **_latencies(job),
    }
    return {name: value for name, value in found.items() if value is not None}


def _asked(job: TokenJob) -> dict[str, AttributeValue | None]:
    params = job.params
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n * job.num_equal,
        "gen_ai.request.best_of": params.best_of,
    }


def _latencies(job: Job) -> dict[str, AttributeValue | None]:
    """Durations of its phases in seconds; for several prompts those of the first that ended."""
    last = next(iter(job.last.values()), None)
    if last is None:
        return {}
    metrics = last.metrics
    return {
        "gen_ai.latency.time_in_queue": metrics.time_in_queue,
        "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
        "gen_ai.latency.time_in_model_prefill": metrics.prefill_time,
        "gen_ai.latency.time_in_model_decode": metrics.decode_time,
        "gen_ai.latency.time_in_model_inference": metrics.inference_time,
        "gen_ai.latency.time_in_scheduler": metrics.scheduler_time,
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
