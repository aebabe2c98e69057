"""One line a finished request; what users wrote is never in it."""

import logging
import time

from pagedserve.server.errors import ServerError
from pagedserve.server.job import Job

logger = logging.getLogger(__name__)


def log_request(job: Job, error: ServerError | None) -> None:
    """Write the line of a request that has been answered, refused or left."""
    usage = job.usage
    parts = [
        f"prompts {job.num_prompts}",
        f"prompt {sum(usage.prompt_tokens.values())} tokens",
        f"cached {sum(usage.cached_tokens.values())}",
        f"new {usage.completion_tokens}",
        f"{time.time() - job.arrival_time:.3f} s",
    ]
    last = next(iter(job.last.values()), None)
    if last is not None and last.metrics.time_in_queue is not None:
        parts.append(f"queue {last.metrics.time_in_queue:.3f} s")
        parts.append(f"first token {last.metrics.time_to_first_token or 0.0:.3f} s")
        parts.append(f"preemptions {last.metrics.num_preemptions}")
    if error is not None:
        parts.append(f"{error.status}")
    elif len(job.last) < job.num_prompts:
        parts.append("client gone")
    else:
        parts.append(",".join(sorted(set(job.finishes))))
    logger.info("%s: %s", job.answer_id, ", ".join(parts))
