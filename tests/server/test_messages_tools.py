"""Tools and reasoning as Anthropic's own client reads them, of a model that keeps to a script."""

import json
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import jsonschema
import pytest
import torch

import tests.support.formula as formula
from pagedserve.config.reasoning import REASONING_FORMATS
from pagedserve.server.messages.blocks import ContentBlock
from pagedserve.server.messages.events import BlockEvents
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served
from tests.server.test_messages import client_of

# Everything that a message has reaches the prompt, and so the count of its tokens.
TEMPLATE: Final = (
    "{{ tools | tojson }}{{ messages | tojson }}{{ enable_thinking }}|"
    "{% if messages[0].content == 'Reason.' %}<think>\n{% endif %}"
)
WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "weather", "description": "Look.", "input_schema": WEATHER},
    {"name": "write", "input_schema": {"type": "object"}},
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
MODEL_LEN: Final = 1 << 16


class Script:
    """What the model generates after the next prompt."""

    def __init__(self, client: anthropic.Anthropic) -> None:
        self.client = client
        self._token_ids: list[int] = []
        self._begin = 0

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, shifts: torch.Tensor | int = 0
    ) -> torch.Tensor:
        del tokens, shifts
        found = torch.full((len(positions), formula.VOCAB_SIZE), -1e3)
        for row, position in enumerate(positions.tolist()):
            place = position + 1 - self._begin
            is_text = 0 <= place < len(self._token_ids)
            found[row, self._token_ids[place] if is_text else formula.EOS] = 0
        return found

    def write(self, text: str, **prompt: Any) -> None:
        """Set what is generated after a prompt."""
        self._begin = self.client.messages.count_tokens(**prompt).input_tokens
        self._token_ids = formula.byte_tokenizer().encode(text)

    def create(self, text: str, **given: Any) -> Any:
        """The message that a text is read as, whole and streamed alike."""
        fields: Any = {"model": "formula", "messages": ASKED, "tools": TOOLS} | given
        counted = {name: fields[name] for name in fields.keys() - {"max_tokens", "stop_sequences"}}
        self.write(text, **counted)
        fields = {"max_tokens": 4096, "extra_body": {"temperature": 0}} | fields
        whole = self.client.messages.create(**fields)
        with self.client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        assert without_ids(streamed) == without_ids(whole)
        assert streamed.usage == whole.usage
        return whole


def without_ids(message: Any) -> Any:
    blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
    return blocks, message.stop_reason, message.stop_sequence


def call(name: str, arguments: object) -> str:
    """A call as models of the Hermes family write it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.fixture(scope="module")
def scripted() -> Iterator[Script]:
    args = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        chat_template=TEMPLATE,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    engine: dict[str, Any] = {
        "max_model_len": MODEL_LEN,
        "num_gpu_blocks": MODEL_LEN // 4,
        "block_size": 8,
        "reasoning_config": REASONING_FORMATS["qwen3"],
    }
    with (
        Served(lambda: formula.FormulaModel().engine(**engine), args) as served,
        client_of(served) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        script = Script(client)
        patch.setattr(formula, "formula_logits", script.logits)
        yield script
        served.wait_until_idle()


def test_text_and_calls_are_blocks(scripted: Script) -> None:
    asked = {"city": "Rome", "days": 3}
    text = f"I look.\n{call('weather', asked)}\n{call('write', {})}"
    message = scripted.create(text)
    said, weather, write = message.content
    assert (said.type, said.text) == ("text", "I look.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", asked)
    assert (write.name, write.input) == ("write", {})
    assert weather.id != write.id
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    single = scripted.create(text, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in single.content] == ["text", "tool_use"]
    plain = scripted.create(text, tool_choice={"type": "none"})
    assert (plain.content[0].text, plain.stop_reason) == (text, "end_turn")


HOSTILE: Final = [
    '</tool_call> "\\" \n\t </think> {"}',
    "é ü 漢字 🦊 \u2028",
    "a" * 300,
    "event: error\ndata: {}\n\n",
]


def test_the_tool_runner_of_the_package(scripted: Script) -> None:
    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Look."""
        return f"rain in {city}"

    prompt: Any = {"model": "formula", "messages": ASKED, "tools": [weather.to_dict()]}
    scripted.write(call("weather", {"city": "Rome"}), **prompt)
    runner = scripted.client.beta.messages.tool_runner(
        model="formula", max_tokens=4096, messages=ASKED, tools=[weather]
    )
    first: Any = next(runner)
    (use,) = first.content
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "rain in Rome"}
    turns: Any = [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    scripted.write("It rains.", **prompt | {"messages": ASKED + turns})
    last: Any = next(runner)
    assert [block.text for block in last.content] == ["It rains."]
    assert list(runner) == []
    thread: Any = {"thread": {"type": "create"}}
    with pytest.raises(anthropic.BadRequestError, match="it is not supported here"):
        scripted.client.messages.create(**prompt, max_tokens=1, extra_body=thread)


def test_fifty_turns_with_tools(scripted: Script) -> None:
    messages: list[Any] = [*ASKED]
    size = 0
    for turn in range(50):
        asked = {"text": HOSTILE[turn % len(HOSTILE)], "turn": turn}
        message = scripted.create(call("write", asked), messages=messages)
        (block,) = message.content
        assert (block.input, message.stop_reason) == (asked, "tool_use")
        assert message.usage.input_tokens > size
        size = message.usage.input_tokens
        result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": f"done {turn}"}
        if turn % 3 == 0:
            result["content"] = [{"type": "text", "text": f"done {turn}"}]
        if turn % 5 == 0:
            result["is_error"] = True
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
    last = scripted.create("All is written.", messages=messages)
    assert (last.content[0].text, last.stop_reason) == ("All is written.", "end_turn")


def test_a_budget_closes_the_thinking(scripted: Script) -> None:
    text = f"<think>{'x' * 40}y"
    budget = {"type": "enabled", "budget_tokens": 10}
    thinking, said = scripted.create(text, thinking=budget).content
    # The tag is in the place of as many characters.
    num_left = 40 - 10 - len("</think>")
    assert (thinking.thinking, said.text) == ("x" * 10, f"{'x' * num_left}y")
    plain = scripted.create(text, thinking={"type": "enabled"})
    (thinking,) = plain.content
    assert thinking.thinking == f"{'x' * 40}y"
    ample = scripted.create(text, thinking=budget | {"budget_tokens": 50})
    assert without_ids(ample) == without_ids(plain)


def test_a_call_that_is_cut_off_is_returned_as_far_as_it_came(scripted: Script) -> None:
    text = call("write", {"done": [1, 2], "text": "x" * 100})
    message = scripted.create(text, max_tokens=90)
    assert message.stop_reason == "max_tokens"
    assert all(block.type == "text" or block.input == {"done": [1, 2]} for block in message.content)
    cut = scripted.create(f"I stop. {text}", stop_sequences=["top"])
    assert (cut.content[0].text, cut.stop_sequence) == ("I s", "top")


def test_reasoning_is_a_block(scripted: Script) -> None:
    text = f"<think>\nIt is cold.\n</think>\n\nYes.\n{call('write', {})}"
    message = scripted.create(text)
    thinking, said, used = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "It is cold.")
    assert thinking.signature
    assert (said.text, used.name) == ("Yes.", "write")
    for switch in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        hidden = scripted.create(text, thinking=switch)
        assert [block.type for block in hidden.content] == ["text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "ok"}
    turns: Any = [
        *ASKED,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    again = scripted.create("Good.", messages=turns)
    left_out = [{**turns[1], "content": message.content[1:]}]
    shorter = scripted.create("Good.", messages=[turns[0], *left_out, turns[2]])
    assert again.usage.input_tokens > shorter.usage.input_tokens + 2 * len("It is cold.")


def test_a_stream_signs_reasoning_before_the_end_of_its_block() -> None:
    """The AI SDK sends back reasoning only with a signature."""
    blocks = BlockEvents()
    events = [*blocks.of_delta({"reasoning": "a", "content": "b"}), *blocks.of_end()]
    data = [json.loads(event.partition("data: ")[2]) for event in events]
    kinds = [each.get("delta", each)["type"] for each in data]
    assert kinds == [
        *("content_block_start", "ping", "thinking_delta", "signature_delta"),
        *("content_block_stop", "content_block_start", "text_delta", "content_block_stop"),
    ]
    assert [data[3]["index"], data[4]["index"]] == [0, 0]
    assert data[3]["delta"]["signature"]


ROME: Final = {"city": "Rome", "days": 3}
REQUIRED: Final = json.dumps([{"name": "weather", "parameters": ROME}] * 2, separators=(",", ":"))
NAMED: Final = json.dumps(ROME, separators=(",", ":"))


@pytest.mark.parametrize(
    ("choice", "text", "num_calls"),
    [
        ({"type": "any"}, REQUIRED, 2),
        ({"type": "any", "disable_parallel_tool_use": True}, REQUIRED, 1),
        ({"type": "tool", "name": "weather"}, NAMED, 1),
    ],
)
def test_required_calls(
    scripted: Script, choice: dict[str, Any], text: str, num_calls: int
) -> None:
    message = scripted.create(text, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    found = [(block.type, block.name, block.input) for block in message.content]
    assert found == [("tool_use", "weather", ROME)] * num_calls


@pytest.mark.parametrize(
    "thinking", [{"type": "enabled", "budget_tokens": 90}, {"type": "adaptive"}]
)
def test_what_a_grammar_holds_follows_the_reasoning(
    scripted: Script, thinking: dict[str, Any]
) -> None:
    """As the prompt opens it; without the grammar the model would write nothing but reasoning."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    text_format = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    cases: list[tuple[dict[str, Any], str, list[str]]] = [
        ({"tool_choice": {"type": "any"}}, REQUIRED, ["tool_use"] * 2),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, NAMED, ["tool_use"]),
        (text_format | {"tool_choice": {"type": "none"}}, '{"city": "Rome"}', ["text"]),
    ]
    for given, answer, kinds in cases:
        given |= {"system": "Reason.", "thinking": thinking}
        message = scripted.create(f"Is it cold?\n</think>{answer}", **given)
        assert [block.type for block in message.content] == ["thinking", *kinds]
        assert message.content[0].thinking == "Is it cold?"
        last = message.content[-1]
        assert last.input == ROME if kinds[0] == "tool_use" else last.text == answer
        unfinished = scripted.create("Is it cold?", **given, max_tokens=5)
        assert [block.type for block in unfinished.content] == ["thinking"]


def test_a_required_call_keeps_to_its_schema(scripted: Script) -> None:
    message = scripted.create("No!", tool_choice={"type": "tool", "name": "weather"})
    assert message.stop_reason == "tool_use"
    jsonschema.validate(message.content[0].input, WEATHER)


def test_a_tool_choice_must_name_a_tool(scripted: Script) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tool_choice names 'other'"):
        scripted.client.messages.create(
            model="formula",
            messages=ASKED,
            max_tokens=9,
            tools=TOOLS,
            tool_choice={"type": "tool", "name": "other"},
        )


def test_a_format_of_the_text(scripted: Script) -> None:
    wanted = {"type": "json_schema", "schema": WEATHER}
    message = scripted.create(
        '{"city": "Rome", "days": 3}', tools=[], output_config={"format": wanted}
    )
    jsonschema.validate(json.loads(message.content[0].text), WEATHER)


def test_images_of_a_model_that_takes_none_are_refused(scripted: Script) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    content: Any = [{"type": "image", "source": source}]
    result: Any = [{"type": "tool_result", "tool_use_id": "x", "content": content}]
    for blocks in (content, result):
        with pytest.raises(anthropic.BadRequestError, match="part of type 'image_url'"):
            scripted.client.messages.create(
                model="formula", messages=[{"role": "user", "content": blocks}], max_tokens=9
            )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": 1e400, "b": -0, "c": 1.0}', '{"a": 1e400, "b": -0, "c": 1.0}'),
        (f'{{"a": {"9" * 5000}}}', f'{{"a": {"9" * 5000}}}'),
        ('{"a": [1, 2, "b', '{"a": [1, 2]}'),
        ("", "{}"),
        ('{"a": 1e400, "b', '{"arguments": "{\\"a\\": 1e400, \\"b"}'),
    ],
)
def test_the_input_of_a_call_stays_as_it_is_written(text: str, wanted: str) -> None:
    block = ContentBlock(0, "tool_use", "id", "write")
    head = '{"type": "tool_use", "id": "id", "name": "write", "input": '
    assert block.whole(text) == f"{head}{wanted}}}"
