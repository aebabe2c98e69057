"""Victims: streams that must not notice what others send, and a probe of /health.

They run in a process of their own, so that the attackers' work on bodies is no gap of theirs.
"""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

NUM_TOKENS: Final = 120
# What is asked; each is asked again and again.
BODIES: Final[tuple[dict[str, Any], ...]] = (
    {"prompt": "the quick brown fox", "temperature": 0},
    {"prompt": "a slow green turtle", "temperature": 0.8, "seed": 7},
    {"prompt": "over and over", "temperature": 1.0, "top_p": 0.9, "seed": 3},
)
# Seconds between two probes, and that an answer may take.
_PROBE_SECONDS: Final = 0.2
_PATIENCE: Final = 60.0
_PATH: Final = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@dataclass(slots=True)
class Findings:
    """What victims saw.

    Attributes:
        texts: Of each body, every different text that it was answered with.
        num_streams: That came to their end.
        num_refused: That found no place, and were sent again.
        gaps: Longest time between two parts of each stream, in seconds.
        faults: What never may happen, in words.
        num_probes: Of /health.
        slowest_probe: In seconds.
    """

    texts: list[list[str]] = field(default_factory=lambda: [[] for _ in BODIES])
    num_streams: int = 0
    num_refused: int = 0
    gaps: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_probes: int = 0
    slowest_probe: float = 0.0


class Victims:
    """The process of the victims; ``stop`` ends it and returns what they saw."""

    def __init__(self, port: int) -> None:
        """Start them."""
        command = [sys.executable, "-m", "tests.hostile.victims", str(port)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | _PATH)

    def stop(self) -> Findings:
        """Let the streams under way end."""
        found, _ = self._process.communicate()
        return Findings(**json.loads(found))


def main() -> None:
    """Watch the server at the port of the command line until the standard input ends."""
    port, findings, is_over = int(sys.argv[1]), Findings(), threading.Event()
    works: list[Callable[[], None]] = [
        partial(_stream_on, port, number, findings, is_over) for number in range(len(BODIES))
    ]
    works.append(partial(_probe, port, findings, is_over))
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    json.dump(asdict(findings), sys.stdout)


def _stream_on(port: int, number: int, findings: Findings, is_over: threading.Event) -> None:
    """Stream one body until all is over, at least once."""
    while True:
        try:
            is_answered = _stream(port, number, findings)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            findings.faults.append(f"victim {number}: {error!r}")
            is_answered = False
        if is_over.wait(0 if is_answered else 0.05) and (is_answered or findings.faults):
            return


def _stream(port: int, number: int, findings: Findings) -> bool:
    """Stream one body; whether it found a place."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    body = BODIES[number] | {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status == http.client.SERVICE_UNAVAILABLE:
        findings.num_refused += 1
        return False
    text, gap, then = "", 0.0, time.monotonic()
    reason = None
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        if text:
            gap = max(gap, time.monotonic() - then)
        then = time.monotonic()
        text += choice["text"]
        reason = choice["finish_reason"] or reason
    connection.close()
    said = text if reason == "length" else f"({reason}) {text}"
    if said not in findings.texts[number]:
        findings.texts[number].append(said)
    findings.gaps.append(gap)
    findings.num_streams += 1
    return True


def _probe(port: int, findings: Findings, is_over: threading.Event) -> None:
    """Ask /health until all is over."""
    while not is_over.wait(_PROBE_SECONDS):
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                findings.faults.append(f"/health: {answer.status} {answer.read()[:200]!r}")
        except (OSError, http.client.HTTPException) as error:
            findings.faults.append(f"/health: {error!r}")
        connection.close()
        findings.num_probes += 1
        findings.slowest_probe = max(findings.slowest_probe, time.monotonic() - began)


if __name__ == "__main__":
    main()
