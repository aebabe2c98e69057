"""``ObservabilityArgs``: options of decision logs and of statistics in the log."""

from dataclasses import dataclass

import pagedserve.checks as checks
from pagedserve.config.options import option, parse_bytes


@dataclass(kw_only=True)
class ObservabilityArgs:
    """The options of ``EngineArgs`` for logging."""

    decision_log: str | None = option(
        None,
        checks.optional(checks.text),
        "File for the scheduler's decisions, one JSON line per step, or a directory for several "
        "files. python -m pagedserve.replay repeats them. A server accepts only a directory, and "
        "creates it.",
        concern="logging and tracing",
        unset="none",
    )
    decision_log_max_bytes: int = option(
        1 << 30,
        checks.count(),
        "Maximum size of all decision logs in a directory, in bytes or as in 512MiB; the oldest "
        "files are deleted first.",
        concern="logging and tracing",
        parse=parse_bytes,
    )
    disable_log_stats: bool = option(
        False,
        checks.flag,
        "Omit the log line of statistics that is written every ten seconds at level INFO.",
        concern="logging and tracing",
    )
