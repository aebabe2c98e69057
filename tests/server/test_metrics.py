"""What ``/metrics`` says, read by Prometheus' own parser."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedserve.host_ops.threads import ThreadWaits
from tests.server.conftest import Serve, Served
from tests.support.formula import FormulaModel

PROMPT = list(range(1, 13))


class Scrape:
    """All samples of one look."""

    def __init__(self, served: Served) -> None:
        self.families = {
            family.name: family
            for family in text_string_to_metric_families(served.http.get("/metrics").text)
        }

    def samples(self, name: str, **labels: str) -> list[float]:
        return [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        (value,) = self.samples(name, **labels)
        return value


@pytest.fixture
def caching(serve: Serve) -> Iterator[Served]:
    with serve({"enable_prefix_caching": True}, enable_prompt_tokens_details=True) as running:
        yield running


def test_tokens_of_prompts_are_told_by_their_source(caching: Served) -> None:
    usages = [caching.complete(prompt=PROMPT, max_tokens=2).json()["usage"] for _ in range(3)]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached > 0
    scrape = Scrape(caching)
    by_source = "vllm:prompt_tokens_by_source_total"
    assert scrape.value(by_source, source="local_cache_hit") == cached
    assert scrape.value(by_source, source="local_compute") == 36 - cached
    assert scrape.value(by_source, source="external_kv_transfer") == 0
    assert scrape.value("vllm:request_prefill_kv_computed_tokens_sum") == 36 - cached
    assert scrape.value("vllm:request_prefill_kv_computed_tokens_count") == 3
    for prefix in ("", "gpu_"):
        assert scrape.value(f"vllm:{prefix}prefix_cache_hits_total") == cached
        assert scrape.value(f"vllm:{prefix}prefix_cache_queries_total") == 36
    assert scrape.value("vllm:mm_cache_queries_total") == 0
    assert 0 < scrape.value("vllm:gpu_prefix_cache_hit_rate") < 1
    assert scrape.value("vllm:cpu_prefix_cache_hit_rate") == -1


def test_the_cache_is_described(caching: Served) -> None:
    (sample,) = Scrape(caching).families["vllm:cache_config_info"].samples
    assert sample.value == 1
    said = {
        "model_name": "formula",
        "block_size": "4",
        "num_gpu_blocks": "64",
        "kv_cache_size_tokens": "256",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.9",
        "sliding_window": "None",
    }
    assert said.items() <= sample.labels.items()
    assert int(sample.labels["num_cpu_blocks"]) == caching.engine.memory.num_cpu_blocks


def test_requests_over_http_are_counted_by_route(serve: Serve) -> None:
    with serve(api_key=("key",)) as served:
        assert served.http.get("/v1/models").status_code == 401
        served.http.headers["authorization"] = "Bearer key"
        assert served.complete(prompt=PROMPT, max_tokens=2).status_code == 200
        assert served.complete(prompt=PROMPT, max_tokens=2, stream=True).status_code == 200
        assert served.complete(prompt=PROMPT, max_tokens=-2).status_code == 400
        assert served.http.get("/v1/models/none").status_code == 404
        assert served.http.get("/nothing/here").status_code == 404
        assert served.http.head("/v1/models").status_code == 200
        assert served.http.request("PROPFIND", "/v1/completions").status_code == 405
        served.wait_until(lambda: served.context.num_open == 0)
        scrape = Scrape(served)
        found = {
            tuple(sample.labels[name] for name in ("handler", "method", "status")): sample.value
            for sample in scrape.families["http_requests"].samples
        }
        assert found == {
            ("none", "GET", "4xx"): 2,  # no key; no such route
            ("/v1/completions", "POST", "2xx"): 2,
            ("/v1/completions", "POST", "4xx"): 1,
            ("/v1/models", "HEAD", "2xx"): 1,
            ("/v1/models/{name:path}", "GET", "4xx"): 1,
            ("/v1/completions", "other", "4xx"): 1,
        }
        seconds = {"handler": "/v1/completions", "method": "POST"}
        assert scrape.value("http_request_duration_seconds_count", **seconds) == 3
        assert scrape.value("http_request_duration_seconds_sum", **seconds) > 0


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"stream": True, "stream_interval": 3}])
def test_each_token_after_the_first_has_a_latency(served: Served, body: dict[str, object]) -> None:
    served.complete(prompt=PROMPT, max_tokens=6, n=2, temperature=1, ignore_eos=True, **body)
    scrape = Scrape(served)
    assert scrape.value("vllm:inter_token_latency_seconds_count") == 2 * 5
    assert scrape.value("vllm:inter_token_latency_seconds_sum") > 0
    assert scrape.value("vllm:generation_tokens_total") == 2 * 6


def test_a_scrape_does_not_block_the_event_loop(served: Served) -> None:
    """Hundreds of routes and methods take tens of milliseconds, as long as several steps."""
    metrics = served.context.metrics

    async def count_turns() -> int:
        scrape = asyncio.create_task(metrics.exposition())
        num_turns = 0
        while not scrape.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert b"http_requests" in scrape.result()
        return num_turns

    assert asyncio.run(count_turns()) > 2  # one where the scrape blocked


def test_a_step_has_a_part_outside_the_executor(served: Served) -> None:
    served.complete(prompt=PROMPT, max_tokens=5)
    scrape = Scrape(served)
    steps = scrape.value("pagedserve:steps_total")
    assert steps >= 5
    assert scrape.value("pagedserve:step_seconds_count") == steps
    assert scrape.value("pagedserve:host_step_seconds_count") == steps
    whole = scrape.value("pagedserve:step_seconds_sum")
    assert 0 < scrape.value("pagedserve:host_step_seconds_sum") < whole
    assert whole == pytest.approx(
        scrape.value("pagedserve:host_step_seconds_sum") + served.engine.stats.executor_seconds
    )


def test_waits_of_the_compute_threads_are_those_of_the_process(served: Served) -> None:
    served.complete(prompt=PROMPT, max_tokens=5)
    before = ThreadWaits.now()
    scrape = Scrape(served)
    names = ("thread_calls_total", "thread_absences_total", "thread_wait_seconds_total")
    found = [scrape.value(f"pagedserve:{name}") for name in names]
    for least, value, most in zip(before, found, ThreadWaits.now(), strict=True):
        assert least <= value <= most


def test_throughput_is_that_since_the_last_scrape(served: Served) -> None:
    rates = ("vllm:avg_prompt_throughput_toks_per_s", "vllm:avg_generation_throughput_toks_per_s")
    served.complete(prompt=PROMPT, max_tokens=5)
    busy, idle = Scrape(served), Scrape(served)
    prompt, generation = (busy.value(rate) for rate in rates)
    assert prompt / generation == pytest.approx(12 / 5)
    assert [idle.value(rate) for rate in rates] == [0, 0]


def test_drafts_are_counted_by_vllms_names(serve: Serve) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with serve({"speculative_config": config}) as running:
        assert Scrape(running).value("vllm:spec_decode_num_drafts_total") == 0
        # The formula repeats itself after 128 tokens at the latest.
        for _ in range(3):
            body = {"prompt": PROMPT * 3, "max_tokens": 80, "temperature": 0}
            assert running.http.post("/v1/completions", json=body).status_code == 200
        seen = Scrape(running)
    drafted = seen.value("vllm:spec_decode_num_draft_tokens_total")
    accepted = seen.value("vllm:spec_decode_num_accepted_tokens_total")
    places = seen.samples("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert seen.value("vllm:spec_decode_num_drafts_total") <= drafted <= 3 * len(PROMPT) * 80
    assert accepted == sum(places) <= drafted
    assert places == sorted(places, reverse=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_load_report_comes_in_the_format_of_the_request(
    shared: Served, path: str, prompt: dict[str, object], stream: bool
) -> None:
    def report(**headers: str) -> str | None:
        body = {**prompt, "max_tokens": 2, "stream": stream}
        answer = shared.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        given: str | None = answer.headers.get("endpoint-load-metrics")
        return given

    text = report(**{"endpoint-load-metrics-format": "TEXT"})
    usage = r"(0|1)\.\d+(e-\d+)?"
    expected = (
        rf"TEXT named_metrics.num_requests_waiting=0\.0, named_metrics.kv_cache_usage_perc={usage}"
    )
    assert re.fullmatch(expected, text or "")
    kind, _, found = (report(**{"endpoint-load-metrics-format": "json"}) or "").partition(" ")
    assert (kind, json.loads(found).keys()) == ("JSON", {"named_metrics"})
    assert json.loads(found)["named_metrics"].keys() == {
        "kv_cache_usage_perc",
        "num_requests_waiting",
    }
    assert report(**{"endpoint-load-metrics-format": "proto"}) is None
    assert report() is None


def test_who_waits_does_so_for_capacity(serve: Serve, formula: FormulaModel) -> None:
    goes_on = threading.Event()
    with serve({"max_num_seqs": 1}) as served, ThreadPoolExecutor(3) as clients:
        formula.executor(served.engine).before_sampling = lambda: assert_set(goes_on)
        answers = [clients.submit(served.complete, prompt=PROMPT, max_tokens=3) for _ in range(3)]
        try:
            served.wait_until(lambda: served.context.admission.num_seqs == 3)
            reasons = "vllm:num_requests_waiting_by_reason"
            served.wait_until(lambda: Scrape(served).value("vllm:num_requests_running") == 1)
            scrape = Scrape(served)
            waiting = scrape.value("vllm:num_requests_waiting")
            assert sum(scrape.samples(reasons)) == waiting
            assert scrape.value(reasons, reason="deferred") == 0
        finally:
            goes_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3
        served.wait_until_idle()


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)
