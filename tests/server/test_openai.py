"""OpenAI's own client against a server of the real model; what it gets is what ``LLM`` says."""

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from pydantic import BaseModel, Field

from pagedserve import SamplingParams
from tests.server.conftest import Process

if TYPE_CHECKING:
    from pagedserve import LLM

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(smollm2_server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == "smollm2"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions_are_those_of_offline_use(client: openai.OpenAI, smollm2: "LLM") -> None:
    prompts = [PROMPT, "Water boils at", "Once upon a time"]
    for params in (
        {"temperature": 0.0, "max_tokens": 16},
        {"temperature": 0.9, "max_tokens": 12, "seed": 7, "top_p": 0.9},
        {"temperature": 0.8, "max_tokens": 8, "seed": 3, "n": 2},
        {"temperature": 0.0, "max_tokens": 12, "presence_penalty": 1.5, "stop": ["\n"]},
    ):
        given: Any = params
        wanted = smollm2.generate(prompts, SamplingParams(**given), use_tqdm=False)
        answer = client.completions.create(model="smollm2", prompt=prompts, **given)
        texts = [completion.text for output in wanted for completion in output.outputs]
        assert [choice.text for choice in answer.choices] == texts
        reasons = [c.finish_reason for output in wanted for c in output.outputs]
        assert [choice.finish_reason for choice in answer.choices] == reasons


def test_token_ids_as_prompts(client: openai.OpenAI, smollm2: "LLM") -> None:
    token_ids = [[504, 3575, 282], [28, 1042]]
    params = SamplingParams(temperature=0, max_tokens=6)
    wanted = smollm2.generate(token_ids, params, use_tqdm=False)
    answer = client.completions.create(
        model="smollm2", prompt=token_ids, max_tokens=6, temperature=0
    )
    assert [choice.text for choice in answer.choices] == [out.outputs[0].text for out in wanted]


def test_log_probabilities(client: openai.OpenAI, smollm2: "LLM") -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    (wanted,) = smollm2.generate([PROMPT], params, use_tqdm=False)
    entries = wanted.outputs[0].logprobs
    assert entries is not None
    answer = client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens is not None
    pairs = zip(wanted.outputs[0].token_ids, entries, strict=True)
    values = [entry[token].logprob for token, entry in pairs]
    assert logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    text = answer.choices[0].text
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert text[offset:].startswith(token)


def test_a_chat_and_its_stream(client: openai.OpenAI, smollm2: "LLM") -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    (wanted,) = smollm2.chat(MESSAGES, params, use_tqdm=False)
    given: Any = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == wanted.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    chunks = list(
        client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == wanted.outputs[0].text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == answer.usage


def test_bytes_of_tokens_are_those_of_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Answer with emoji: 🎉🦊"}],
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    data = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    content = answer.choices[0].message.content
    assert content is not None
    assert data.decode(errors="replace").startswith(content.rstrip("\ufffd"))
    assert {len(token.top_logprobs) for token in logprobs.content} == {2}


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="smollm2", prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": ""}}],
        )


def test_many_streams_at_once(smollm2_server: Process, smollm2: "LLM") -> None:
    prompts = [f"Number {number} is" for number in range(24)]
    params = SamplingParams(temperature=0, max_tokens=12)
    wanted = [out.outputs[0].text for out in smollm2.generate(prompts, params, use_tqdm=False)]

    async def text_of(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_texts() -> list[str]:
        url = f"{smollm2_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(text_of(client, prompt) for prompt in prompts))

    assert asyncio.run(all_texts()) == wanted


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int


def test_answers_keep_to_a_format(client: openai.OpenAI) -> None:
    chat: Any = client.chat.completions
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    parsed = chat.parse(response_format=Person, **asked)
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person)
    with chat.stream(response_format=Person, **asked) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == person
    answer = chat.create(response_format={"type": "json_object"}, **asked)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    for body in (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_json": {"enum": ["yes", "no"]}},
    ):
        completion = client.completions.create(
            model="smollm2", prompt=PROMPT, max_tokens=9, extra_body=body
        )
        assert completion.choices[0].text.strip('"') in {"yes", "no"}
    plain = chat.create(**asked)
    assert chat.create(response_format={"type": "text"}, **asked).choices == plain.choices


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            r"response_format cannot be used at #: Invalid type: x",
        ),
        ({"response_format": {"type": "json_schema"}}, r"json_schema\.schema is missing"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "at most one may say"),
        ({"structured_outputs": {"regex": "(("}}, "unclosed group"),
    ],
)
def test_formats_that_cannot_be_are_refused(
    client: openai.OpenAI, body: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=refusal):
        client.chat.completions.create(model="smollm2", messages=MESSAGES, extra_body=body)
