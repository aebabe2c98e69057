"""Conversations and what becomes of them, with a template whose text is known."""

from collections.abc import Callable
from typing import Any

import openai.types.chat as openai_chat
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedserve import RequestError
from pagedserve.inputs.chat import chat_prompt, conversations_of
from pagedserve.inputs.images import ImageRules

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} . {% endfor %}"
    "{% if tools %}{{ tools[0].name }} {% endif %}{% if loud %}loud {% endif %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["user", "assistant", "hello", "there", ".", "search", "loud", "<s>"]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words are tokens, and whoever asks for special tokens gets one in front."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", chat_template=TEMPLATE)


def words(prompt: Any) -> str:
    return " ".join(WORDS[token] for token in prompt["prompt_token_ids"])


def test_a_conversation_becomes_text_and_its_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = chat_prompt(tokenizer, HELLO)
    assert prompt.get("prompt") == "user hello . assistant"
    assert words(prompt) == "user hello . assistant"


def test_parts_of_text_are_one_text(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": parts}])
    assert prompt.get("prompt") == "user hello\nthere . assistant"


def test_a_template_gets_parts_where_they_are_requested(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = "{% for part in messages[0].content %}{{ part.text }} . {% endfor %}"
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    for content, said in (("hello", "hello ."), (parts, "hello . there .")):
        messages: Any = [{"role": "user", "content": content}]
        prompt = chat_prompt(tokenizer, messages, chat_template=template, keeps_parts=True)
        assert words(prompt) == said


def test_a_refusal_of_the_assistant_is_its_text(tokenizer: PreTrainedTokenizerFast) -> None:
    part = {"type": "refusal", "refusal": "there"}
    fields: list[Any] = [{"content": [part]}, {"content": None, "refusal": "there"}]
    for refused in fields:
        prompt = chat_prompt(tokenizer, [*HELLO, {"role": "assistant"} | refused])
        assert words(prompt) == "user hello . assistant there . assistant"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_developer_is_the_system_unless_the_template_names_the_role(
    tokenizer: PreTrainedTokenizerFast, role: str
) -> None:
    template = f"{{{{ messages[0].content if messages[0].role == '{role}' }}}}"
    messages = [{"role": "developer", "content": "hello"}, *HELLO]
    assert words(chat_prompt(tokenizer, messages, chat_template=template)) == "hello"


# Templates that do not show a system message after the start.
AT_THE_START = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system at the start') }}{% endif %}"
    "{{ m.role }} {{ m.content }} . {% endfor %}"
)
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest | selectattr('role', 'ne', 'tool') %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}"
)
OMITTING = (
    "{% for m in messages if m.role != 'system' or loop.first %}"
    "{{ m.role }} {{ m.content }} . {% endfor %}"
)


def said(spoken: str) -> list[dict[str, str]]:
    """Messages of roles in short, as ``u:a``."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    pairs = (each.split(":") for each in spoken.split())
    return [{"role": roles[role], "content": text} for role, text in pairs]


@pytest.mark.parametrize("template", [AT_THE_START, ALTERNATING])
@pytest.mark.parametrize(
    ("spoken", "shown"),
    [
        ("s:a u:b", "system a . user b . "),
        ("s:a s:b u:c", "system a\n\nb . user c . "),
        ("u:a s:b", "user a\n\nb . "),
        ("u:a s:b u:c a:d s:e", "user a\n\nb\n\nc . assistant d . user e . "),
        ("u:a a:b s:c s:d u:e", "user a . assistant b . user c\n\nd\n\ne . "),
        ("u:a a:b t:c s:d", "user a . assistant b . tool c\n\nd . "),
        ("u:a a:b t:c s:d u:e", "user a . assistant b . tool c\n\nd . user e . "),
    ],
)
def test_a_late_system_message_is_joined_to_others_where_the_template_refuses_it(
    tokenizer: PreTrainedTokenizerFast, template: str, spoken: str, shown: str
) -> None:
    prompt = chat_prompt(tokenizer, said(spoken), chat_template=template)
    assert prompt.get("prompt") == shown


def test_a_late_system_message_leaves_the_prefix_before_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = said("s:a u:b s:c a:d t:e s:f a:g s:h u:i a:j")
    whole = chat_prompt(tokenizer, messages, chat_template=AT_THE_START).get("prompt")
    for end in (3, 6, 9):  # where the assistant's turn begins
        turn = chat_prompt(tokenizer, messages[:end], chat_template=AT_THE_START).get("prompt")
        assert str(whole).startswith(str(turn))


def test_a_late_system_message_that_the_template_would_omit_is_joined_to_others(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = chat_prompt(tokenizer, said("u:a s:b"), chat_template=OMITTING)
    assert prompt.get("prompt") == "user a\n\nb . "


def test_a_late_system_message_joins_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    )
    images = ImageRules(token="<image>", most=1)
    image = {"type": "image", "image": Image.new("RGB", (2, 2))}
    seen: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    for messages, shown in ((said("u:a s:b"), "[a\n\nb]"), ([*seen, *said("s:b")], "[a][][b]")):
        prompt = chat_prompt(tokenizer, messages, chat_template=template, images=images)
        assert prompt.get("prompt") == shown


def test_a_late_system_message_stays_where_the_template_shows_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = "{{ raise_exception('quiet') if not loud }}" + TEMPLATE
    prompt = chat_prompt(
        tokenizer,
        said("u:a s:b u:c a:d s:e u:f"),
        chat_template=template,
        chat_template_kwargs={"loud": True},
    )
    wanted = "user a . system b . user c . assistant d . system e . user f . loud assistant"
    assert prompt.get("prompt") == wanted


def test_what_the_template_takes_is_handed_to_it(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = chat_prompt(
        tokenizer,
        HELLO,
        add_generation_prompt=False,
        tools=[{"name": "search"}],
        chat_template_kwargs={"loud": True},
    )
    assert words(prompt) == "user hello . search loud"
    other = chat_prompt(tokenizer, HELLO, chat_template="{{ messages[0].content }} there")
    assert words(other) == "hello there"


@pytest.mark.parametrize("calls", [[], None])
def test_no_earlier_calls_are_no_field_to_the_template(
    tokenizer: PreTrainedTokenizerFast, calls: Any
) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}search{% else %}{{ m.content }}"
        "{% endif %} {% endfor %}"
    )
    messages: Any = [*HELLO, {"role": "assistant", "content": "there", "tool_calls": calls}]
    assert words(chat_prompt(tokenizer, messages, chat_template=template)) == "hello there"


@pytest.mark.parametrize("calls", ["search", 5, {"name": "search"}, ["search"], [None]])
def test_earlier_calls_that_are_no_list_of_objects_are_refused(
    tokenizer: PreTrainedTokenizerFast, calls: Any
) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "there", "tool_calls": calls}]
    with pytest.raises(
        RequestError, match=r"tool_calls of a message is .* a list of objects"
    ) as refusal:
        chat_prompt(tokenizer, messages)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("make", [list, tuple, iter])
def test_objects_of_openais_library_are_calls_too(
    tokenizer: PreTrainedTokenizerFast, make: Callable[[Any], Any]
) -> None:
    template = "{{ messages[1].tool_calls[0].function.name }} {{ messages[0].content }}"
    function = openai_chat.chat_completion_message_function_tool_call.Function
    call = openai_chat.ChatCompletionMessageFunctionToolCall(
        id="a", type="function", function=function(name="search", arguments="{}")
    )
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": make([call])}]
    assert words(chat_prompt(tokenizer, messages, chat_template=template)) == "search hello"


@pytest.mark.parametrize("given", ['{"word": "there"}', {"word": "there"}])
def test_arguments_of_earlier_calls_are_objects_to_the_template(
    tokenizer: PreTrainedTokenizerFast, given: Any
) -> None:
    template = "{{ messages[1].tool_calls[0].function.arguments.word }} {{ messages[0].content }}"
    call = {"type": "function", "function": {"name": "search", "arguments": given}}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert words(chat_prompt(tokenizer, messages, chat_template=template)) == "there hello"


def test_what_is_no_argument_of_a_call_reaches_the_template_as_it_is(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = "{{ messages[1].tool_calls[0].function.arguments }}"
    call = {"type": "function", "function": {"name": "search", "arguments": "hello"}}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert words(chat_prompt(tokenizer, messages, chat_template=template)) == "hello"


def test_arguments_that_are_nested_too_deeply_stay_text(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ 'hello' if messages[1].tool_calls[0].function.arguments is string }}"
    call = {"type": "function", "function": {"name": "search", "arguments": "[" * 100_000}}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert words(chat_prompt(tokenizer, messages, chat_template=template)) == "hello"


def test_a_last_message_can_be_continued(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hello"}]
    prompt = chat_prompt(
        tokenizer, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert words(prompt) == "user hello . assistant hello"
    with pytest.raises(RequestError, match="add_generation_prompt and continue_final_message"):
        chat_prompt(tokenizer, messages, continue_final_message=True)


def test_what_is_no_text_is_refused_by_name(tokenizer: PreTrainedTokenizerFast) -> None:
    image = [{"type": "image_url", "image_url": {"url": "a"}}]
    with pytest.raises(RequestError, match="'image_url'; the model does not accept images"):
        chat_prompt(tokenizer, [{"role": "user", "content": image}])


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": {"a": 1}}])
def test_text_of_a_part_that_is_no_string_is_refused(
    tokenizer: PreTrainedTokenizerFast, part: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="a part whose text is"):
        chat_prompt(tokenizer, [{"role": "user", "content": [part]}])


def test_a_template_that_raises_is_a_bad_request(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(RequestError, match="the chat template does not take the messages: no role"):
        chat_prompt(tokenizer, HELLO, chat_template="{{ raise_exception('no role') }}")
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="has no chat template: give chat_template"):
        chat_prompt(tokenizer, HELLO)


def test_one_conversation_or_several() -> None:
    assert conversations_of(HELLO) == [HELLO]
    assert conversations_of([HELLO, HELLO]) == [HELLO, HELLO]


@pytest.mark.parametrize("messages", [[], "hello", [[]], ["hello"], [HELLO, "a"], [{"a": 1}], 5])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="it must be a list of messages"):
        conversations_of(messages)
