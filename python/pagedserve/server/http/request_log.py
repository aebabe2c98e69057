"""What is recorded of a finished request: one log line, and the attributes of its span.

Users' texts are included only if requested, and only in the log.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from starlette.types import Scope

from pagedserve.engine.stats import request_time
from pagedserve.server.http.errors import ServerError, scrubbed
from pagedserve.server.job import Job, TokenJob

logger = logging.getLogger(__name__)

# Status of a request whose client disconnected before the response; nginx's.
CLIENT_GONE: Final = 499
_OK: Final = 200
_FAILURES: Final = 500


def log_request(job: Job, error: ServerError | None) -> None:
    """Log a request that has finished, was refused or was cancelled."""
    fields = _fields(job, error)
    said = _readable(fields)
    if job.context.args.log_prompts:
        texts = _texts(job)
        fields |= texts
        said += "".join(f", {name} {_quoted(texts[name])}" for name in texts)
    logger.info("%s", said, extra={"fields": fields})


def span_attributes(job: Job, seconds: float) -> dict[str, Any]:
    """Attributes of the span of a request of that duration, by vLLM's names, without texts."""
    usage = job.usage
    found: dict[str, Any] = {
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


def _asked(job: TokenJob) -> dict[str, Any]:
    params = job.params
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n * job.num_equal,
        "gen_ai.request.best_of": params.best_of,
    }


def _latencies(job: Job) -> dict[str, Any]:
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


def log_http(scope: Scope, seconds: float) -> None:
    """Log an HTTP request without generation, or one that was refused at once."""
    fields = {
        "request_id": scope["request_id"],
        "method": scope["method"],
        "path": quote(scope["path"]),
        "status": scope["status"],
        "e2e_seconds": round(seconds, 6),
    }
    logger.info(
        "%(request_id)s: %(method)s %(path)s, %(status)s, %(e2e_seconds).3f s",
        fields,
        extra={"fields": fields},
    )


def _fields(job: Job, error: ServerError | None) -> dict[str, Any]:
    is_left = error is None and len(job.last) < job.num_prompts
    return {
        "request_id": job.answer_id,
        "model": job.model,
        "status": error.status if error is not None else CLIENT_GONE if is_left else _OK,
        "num_prompts": job.num_prompts,
        **_counts(job),
        **_times(job),
        "e2e_seconds": round(request_time() - job.arrival_time, 6),
        "finish_reasons": job.finishes,
        "client_gone": is_left,
        "error": None if error is None else _reason(error),
    }


def _counts(job: Job) -> dict[str, int | None]:
    """Numbers of tokens; None if no output came, as of a whole answer whose client left."""
    usage = job.usage
    if not usage.prompt_tokens:
        return dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"))
    return {
        "prompt_tokens": sum(usage.prompt_tokens.values()),
        "cached_tokens": sum(usage.cached_tokens.values()),
        "completion_tokens": usage.completion_tokens,
    }


def _times(job: Job) -> dict[str, float | int | None]:
    """Durations of its phases in seconds; for several prompts those of the first that ended."""
    place, last = next(iter(job.last.items()), (0, None))
    if last is None:
        names = ("queue_seconds", "ttft_seconds", "tpot_seconds", "num_preemptions")
        return dict.fromkeys(names)
    metrics = last.metrics
    pools = last.pooled is not None
    # For several sequences only the total number of tokens is known.
    num_tokens = job.progress[place].num_tokens if job.num_seqs == job.num_prompts else 0
    return {
        "queue_seconds": _rounded(metrics.time_in_queue),
        "ttft_seconds": None if pools else _rounded(metrics.time_to_first_token),
        "tpot_seconds": _rounded(metrics.time_per_output_token(num_tokens)),
        "num_preemptions": metrics.num_preemptions,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _reason(error: ServerError) -> str:
    """Reason of a failure; only the type for a bad request, whose message may repeat its text."""
    return scrubbed(error.message) if error.status >= _FAILURES else error.kind


def _readable(fields: Mapping[str, Any]) -> str:
    parts = [f"prompts {fields['num_prompts']}"]
    if fields["prompt_tokens"] is not None:
        parts += [
            f"prompt {fields['prompt_tokens']} tokens",
            f"cached {fields['cached_tokens']}",
            f"new {fields['completion_tokens']}",
        ]
    parts.append(f"{fields['e2e_seconds']:.3f} s")
    durations = {name: fields[f"{name}_seconds"] for name in ("queue", "ttft", "tpot")}
    parts += [f"{name} {time:.3f} s" for name, time in durations.items() if time is not None]
    if fields["num_preemptions"] is not None:
        parts.append(f"preemptions {fields['num_preemptions']}")
    if fields["error"] is not None:
        parts.append(f"{fields['status']} {fields['error']}")
    elif fields["client_gone"]:
        parts.append("client gone")
    else:
        parts.append(",".join(sorted(set(fields["finish_reasons"]))))
    return f"{fields['request_id']}: {', '.join(parts)}"


def _quoted(texts: object) -> str:
    """Quote text without line breaks; lone surrogates become question marks."""
    return json.dumps(texts, ensure_ascii=False).encode(errors="replace").decode()


def _texts(job: Job) -> dict[str, Any]:
    """Input and output texts as sent; each truncated to ``max_log_len``."""
    most = job.context.args.max_log_len
    given = job.asked
    if not isinstance(given, str):
        given = json.dumps(given, ensure_ascii=False, default=vars)
    return {
        "prompt": given[:most],
        "outputs": [
            text[:most] for progress in job.progress.values() for text in progress.texts.values()
        ],
    }
