"""What one request's answer is taken for, from a real server on loopback."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from socket import socket
from typing import Any

import pytest

from pagedserve.bench.api import APIS
from pagedserve.bench.client import Client, Job, first_model, open_session
from pagedserve.bench.outcome import Outcome
from pagedserve.errors import ConfigError
from tests.support.openai_server import (
    DONE,
    MODEL,
    Reply,
    chat,
    completion,
    serving,
    text_events,
    usage,
)


def outcome_of(
    reply: Reply, *, backend: str = "openai", timeout_s: float = 60.0, **options: Any
) -> Outcome:
    """What comes of a request that is answered so."""

    async def send(url: str) -> Outcome:
        async with open_session(headers={}, timeout_s=timeout_s) as session:
            client = Client(session, url=url, api=APIS[backend], **options)
            return await client.send(Job(b"{}", due_s=0.0, num_input_tokens=5), due=0.0)

    with serving(lambda _number, _request: reply) as server:
        return asyncio.run(send(server.url + APIS[backend].endpoint))


def kind_of(outcome: Outcome) -> str | None:
    return None if outcome.failure is None else outcome.failure.kind


def message_of(outcome: Outcome) -> str:
    assert outcome.failure is not None
    return outcome.failure.message


def test_tokens_are_those_of_the_usage() -> None:
    outcome = outcome_of(Reply(text_events(4, prompt_tokens=11, completion_tokens=6)))
    assert kind_of(outcome) is None
    assert (outcome.num_input_tokens, outcome.num_output_tokens) == (11, 6)
    assert len(outcome.output_times) == 4


def test_texts_are_kept_on_request() -> None:
    reply = Reply(text_events(2))
    assert outcome_of(reply).texts is None
    assert outcome_of(reply, keeps_texts=True).texts == [" w0", " end"]


def test_without_usage_pieces_are_counted_and_the_plan_holds() -> None:
    outcome = outcome_of(Reply(text_events(4, prompt_tokens=None)))
    assert kind_of(outcome) is None
    assert (outcome.num_input_tokens, outcome.num_output_tokens) == (5, None)
    assert outcome.output_tokens() == 4


def test_no_time_is_shorter_than_what_the_server_waited() -> None:
    outcome = outcome_of(Reply(text_events(5), gap_s=0.02))
    assert outcome.started < outcome.output_times[0]
    assert outcome.output_times == sorted(outcome.output_times)
    assert outcome.ttft() >= 0.02 * 0.9
    assert outcome.e2el() >= 5 * 0.02 * 0.9
    assert outcome.ttft() + sum(outcome.itls()) == pytest.approx(outcome.e2el())


@pytest.mark.parametrize(
    ("backend", "events", "num_pieces"),
    [
        # A token whose text is held back is one; an end without text is none.
        ("openai", [completion("a"), completion(""), completion("b"), completion("", "stop")], 3),
        ("openai", [completion("a"), completion("b", "length")], 2),
        ("openai", [completion("", "stop")], 0),
        # A role is no output, nor is an empty text with it; a role that every chunk repeats is.
        ("openai-chat", [chat(role="assistant", content=""), chat(content="a"), chat("stop")], 1),
        ("openai-chat", [chat(role="assistant"), chat(content=""), chat("stop", content="b")], 2),
        ("openai-chat", [chat(role="assistant", content="a"), chat("stop")], 1),
        ("openai-chat", [chat(reasoning_content="so"), chat(content="a"), chat("stop")], 2),
        ("openai-chat", [chat(tool_calls=[{"index": 0}]), chat("tool_calls")], 1),
    ],
)
def test_what_is_a_piece_of_output(backend: str, events: Sequence[object], num_pieces: int) -> None:
    outcome = outcome_of(Reply([*events, usage(3, 4), DONE]), backend=backend)
    assert kind_of(outcome) is None
    assert len(outcome.output_times) == num_pieces
    assert outcome.num_output_tokens == 4


def test_usage_in_every_chunk_counts_once() -> None:
    first = {**completion("a"), "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    last = {**completion("b", "stop"), "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    assert outcome_of(Reply([first, last, DONE])).num_output_tokens == 2


def test_a_stream_may_end_without_its_last_word() -> None:
    assert kind_of(outcome_of(Reply([completion("a"), completion("b", "stop")]))) is None


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (Reply(["later"], 503, {"Retry-After": "7"}), "refused", "503: later (Retry-After: 7)"),
        (Reply([{"error": {"message": "too many"}}], 429), "refused", "429: too many"),
        (Reply([{"error": {"message": "no such"}}], 404), "status_404", "no such"),
        (Reply([{"object": "error", "message": "flat"}], 400), "status_400", "flat"),
        (Reply(["<html>", ""], 500), "status_500", "<html>"),
        (Reply([], 500), "status_500", "Reason"),
        (Reply(text_events(4)[:2], cut=True), "broken_stream", "ended before the answer did"),
        (Reply(text_events(4)[:2]), "broken_stream", "ended before the answer did"),
        (Reply([completion("a"), "{"]), "broken_stream", ""),
        (Reply([completion("a"), "7"]), "broken_stream", "not a chunk"),
        (Reply([completion("a"), {"error": {"message": "died"}}, DONE]), "broken_stream", "died"),
        (Reply([completion("a"), completion("", "abort"), DONE]), "broken_stream", "abort"),
        (Reply([DONE]), "broken_stream", "held no answer"),
    ],
)
def test_what_goes_wrong_has_a_kind_and_words(reply: Reply, kind: str, words: str) -> None:
    outcome = outcome_of(reply)
    assert kind_of(outcome) == kind
    assert words in message_of(outcome)
    assert "\n" not in message_of(outcome)


def test_an_answer_that_never_comes_is_given_up() -> None:
    outcome = outcome_of(Reply(text_events(2), gap_s=60.0), timeout_s=0.1)
    assert kind_of(outcome) == "timeout"


def free_port() -> int:
    with closing(socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def test_nobody_there_is_a_failure_of_each_request_and_an_error_of_the_first_question() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    async def ask() -> Outcome:
        async with open_session(headers={}, timeout_s=9.0) as session:
            with pytest.raises(ConfigError, match=f"no server answers at {url}"):
                await first_model(session, url)
            client = Client(session, url=url, api=APIS["openai"])
            return await client.send(Job(b"{}", due_s=0.0, num_input_tokens=5), due=0.0)

    assert kind_of(asyncio.run(ask())) == "connection"


def test_a_server_says_its_first_model() -> None:
    async def ask(url: str) -> str | None:
        async with open_session(headers={}, timeout_s=9.0) as session:
            return await first_model(session, url)

    with serving(lambda _number, _request: Reply([], 404)) as server:
        assert asyncio.run(ask(server.url)) == MODEL
        assert asyncio.run(ask(server.url + "/elsewhere")) is None
