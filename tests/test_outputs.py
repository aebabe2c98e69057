"""Outputs in programs that construct, extend and serialize them."""

from typing import Any

from pagedserve import CompletionOutput, RequestOutput
from pagedserve.outputs import Logprob, RequestMetrics


def test_outputs_need_only_what_has_no_default() -> None:
    completion: Any = CompletionOutput(0, "a", [5])
    output: Any = RequestOutput("7", "b", [1], None, [completion], finished=True)
    assert (output.metrics, output.kv_transfer_params, completion.routed_experts) == (None,) * 3
    logprob: Any = Logprob(logprob=-1.0)
    assert (logprob.rank, logprob.decoded_token) == (None, None)


def test_attributes_can_be_added_and_listed() -> None:
    completion: Any = CompletionOutput(0, "a", [5])
    completion.delta_text = "a"
    output: Any = RequestOutput("7", "b", [1], None, [completion], finished=True)
    output.is_final = True
    assert vars(completion)["delta_text"] == vars(completion)["text"] == "a"
    assert (output.__dict__["request_id"], vars(output)["is_final"]) == ("7", True)


def test_metrics_have_the_names_of_newer_releases_too() -> None:
    metrics = RequestMetrics(3.0)
    assert (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_latency) == (3.0, 0.0, 0.0)
    metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time = 4.0, 5.0, 7.0
    assert (metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts) == (4.0, 5.0, 7.0)
    assert metrics.first_token_latency == metrics.time_to_first_token == 2.0
