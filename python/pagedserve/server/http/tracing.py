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

from pagedserve.server.http.errors import ServerError, scrubbed

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
        self,
        attributes: Mapping[str, AttributeValue],
        seconds: float,
        *,
        headers: Mapping[str, str],
        error: ServerError | None,
    ) -> None:
        """Create the span of a request that has finished, was refused or was cancelled.

        Args:
            attributes: Attributes of the span.
            seconds: Duration of the request until now.
            headers: Request headers; ``traceparent`` names the parent span.
            error: Error that was sent to the client.
        """
        ended = time.time()
        span = self._tracer.start_span(
            "llm_request",
            context=_PARENT.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
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


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
