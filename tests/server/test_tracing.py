"""Spans of requests, as a collector of OpenTelemetry gets them."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from pagedserve.cli import main
from pagedserve.errors import ConfigError
from pagedserve.server.options import ServerArgs
from pagedserve.server.start import make_tracer
from tests.server.conftest import Serve
from tests.support.formula import FormulaModel

PROMPT = list(range(1, 7))
LATENCIES = (
    "e2e",
    "time_in_queue",
    "time_to_first_token",
    "time_in_model_prefill",
    "time_in_model_decode",
    "time_in_model_inference",
    "time_in_scheduler",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def spans(self) -> Iterator[tuple[str, Span]]:
        """Each span, and the service that it is of."""
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                (service,) = [
                    attribute.value.string_value
                    for attribute in resource.resource.attributes
                    if attribute.key == "service.name"
                ]
                for scope in resource.scope_spans:
                    yield from ((service, span) for span in scope.spans)

    def by_id(self) -> dict[str, Span]:
        return {str(attributes(span)["gen_ai.request.id"]): span for _, span in self.spans()}


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    thread = threading.Thread(target=running.server.serve_forever)
    thread.start()
    yield running
    running.server.shutdown()
    thread.join()
    running.server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        assert kind is not None
        value = getattr(attribute.value, kind)
        if kind == "array_value":
            value = [entry.string_value for entry in value.values]
        found[attribute.key] = value
    return found


def test_a_request_is_a_span_of_the_trace_it_came_with(serve: Serve, collector: Collector) -> None:
    before = time.time_ns()
    with serve(otlp_traces_endpoint=collector.url) as served:
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2}
        for streams in (False, True):
            body |= {"stream": streams, "request_id": f"streams-{streams}"}
            assert served.http.post("/v1/completions", json=body, headers=parent).is_success
    after = time.time_ns()
    assert {service for service, _ in collector.spans()} == {"pagedserve"}
    spans = collector.by_id()
    assert spans.keys() == {"cmpl-streams-False", "cmpl-streams-True"}
    for span in spans.values():
        assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= after
        said = attributes(span)
        expected = {
            "gen_ai.response.model": "formula",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.n": 2,
            "gen_ai.usage.num_sequences": 2,
            "gen_ai.usage.prompt_tokens": 6,
            "gen_ai.usage.completion_tokens": 10,
            "gen_ai.response.finish_reasons": ["length", "length"],
        }
        assert expected.items() <= said.items()
        seconds = {name: said[f"gen_ai.latency.{name}"] for name in LATENCIES}
        whole = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert seconds["e2e"] == pytest.approx(whole, abs=1e-5)
        queue, first = seconds["time_in_queue"], seconds["time_to_first_token"]
        assert 0 <= queue <= first <= seconds["e2e"]
        assert first == pytest.approx(queue + seconds["time_in_model_prefill"], abs=1e-5)


def test_what_fails_and_who_leaves_is_a_span_too(
    serve: Serve, collector: Collector, formula: FormulaModel
) -> None:
    with serve(otlp_traces_endpoint=collector.url) as served:
        body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "request_id": "left"}
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        served.wait_until_idle()

        def fails() -> None:
            raise ValueError("in /home/somebody/model")

        formula.executor(served.engine).before_sampling = fails
        served.complete(prompt=PROMPT, max_tokens=100, request_id="failed")
    spans = collector.by_id()
    assert spans.keys() == {"cmpl-left", "cmpl-failed"}
    assert spans["cmpl-left"].status.code == 0
    assert "gen_ai.response.finish_reasons" not in attributes(spans["cmpl-left"])
    assert spans["cmpl-failed"].status.code == 2
    assert "home" not in spans["cmpl-failed"].status.message
    assert attributes(spans["cmpl-failed"])["http.response.status_code"] == 500
    assert not spans["cmpl-failed"].parent_span_id


def test_an_unsampled_trace_has_no_spans(serve: Serve, collector: Collector) -> None:
    with serve(otlp_traces_endpoint=collector.url) as served:
        served.http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-00"
        assert served.complete(prompt=PROMPT, max_tokens=2).is_success
    assert not list(collector.spans())


def test_a_collector_that_is_gone_is_no_error_of_a_request(
    serve: Serve, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds
    collector.server.server_close()
    with serve(otlp_traces_endpoint=collector.url) as served:
        assert served.complete(prompt=PROMPT, max_tokens=2).is_success
        served.wait_until_idle()


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pagedserve.server.http.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert make_tracer(None) is None
    with pytest.raises(ImportError, match=r"--otlp-traces-endpoint needs .*opentelemetry-sdk>="):
        make_tracer("http://127.0.0.1:4318/v1/traces")


def test_the_option_is_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="begins with http"):
        ServerArgs(otlp_traces_endpoint="127.0.0.1:4317")
    endpoint = "http://127.0.0.1:4318/v1/traces"
    assert main(["serve", "no/such-model", "--port", "0", "--otlp-traces-endpoint", endpoint]) != 0
    assert "no/such-model" in capsys.readouterr().err
