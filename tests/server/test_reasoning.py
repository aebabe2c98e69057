"""Whether a response starts within reasoning: by its prompt, and by what a grammar holds."""

from typing import Any

import pytest

from pagedserve.config.reasoning import REASONING_FORMATS
from pagedserve.server.chat.answer_reader import AnswerReader
from pagedserve.server.chat.protocol import ChatBody
from tests.server.conftest import TEMPLATE, Serve
from tests.server.test_completions import events

USER = {"role": "user", "content": "Is <think> a tag?"}


def fields_of(
    text: str, parser: str, prompt: str, *, may_reason: bool = True, **given: Any
) -> dict[str, Any]:
    """What a text after a prompt is read as, whole."""
    body = ChatBody.model_validate({"model": "m", "messages": [USER]} | given)
    reader = AnswerReader(body=body, tools=None, reasoning=REASONING_FORMATS[parser])
    reader.may_reason = may_reason
    reader.begin_behind(prompt)
    return reader.fields(0, text, is_last=True, is_delta=False)


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_what_the_prompt_closes_is_not_open(parser: str) -> None:
    """As templates write it where thinking is off."""
    found = fields_of("Paris.", parser, "assistant\n<think>\n\n</think>\n\n")
    assert found == {"content": "Paris."}


def test_texts_of_some_models_start_with_reasoning() -> None:
    begun = fields_of("so</think>Paris.", "deepseek_r1", "assistant\n")
    assert (begun["reasoning"], begun["content"]) == ("so", "Paris.")
    assert fields_of("so Paris.", "qwen3", "assistant\n") == {"content": "so Paris."}
    opened = fields_of("so</think>Paris.", "qwen3", "assistant\n<think>\n")
    assert (opened["reasoning"], opened["content"]) == ("so", "Paris.")


def test_a_text_that_a_grammar_holds_does_not() -> None:
    found = fields_of('{"a": 1}', "deepseek_r1", "assistant\n", may_reason=False)
    assert found == {"content": '{"a": 1}'}
    opened = fields_of('so</think>{"a": 1}', "deepseek_r1", "<think>\n", may_reason=False)
    assert (opened["reasoning"], opened["content"]) == ("so", '{"a": 1}')


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_a_message_is_continued_where_it_ended(parser: str) -> None:
    def continued(begun: str, text: str) -> dict[str, Any]:
        messages = [USER, {"role": "assistant", "content": begun}]
        options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        return fields_of(text, parser, f"Is <think> a tag?{begun}", messages=messages, **options)

    assert continued("The answer is (", "B).") == {"content": "B)."}
    assert continued("<think>x</think>It", " is.") == {"content": " is."}
    found = continued("<think>Let me", " see</think>Yes.")
    assert (found["reasoning"].strip(), found["content"]) == ("see", "Yes.")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
    ],
)
def test_reasoning_has_the_names_that_the_server_gives_it(
    serve: Serve, name: str, names: set[str]
) -> None:
    chat = {
        "messages": [USER],
        "max_tokens": 60,
        "structured_outputs": {"choice": ["<think>so</think>Paris."]},
    }
    options = {"reasoning_parser": "qwen3", "reasoning_field": name}
    with serve(chat_template=TEMPLATE, **options) as served:
        whole = served.http.post("/v1/chat/completions", json=chat)
        stream = served.http.post("/v1/chat/completions", json=chat | {"stream": True})
    message = whole.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Paris."} | dict.fromkeys(names, "so")
    deltas = [event["choices"][0]["delta"] for event in events(stream)]
    for found in ("reasoning", "reasoning_content"):
        text = "".join(delta.get(found, "") for delta in deltas)
        assert text == ("so" if found in names else "")
