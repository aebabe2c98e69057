"""Limits of requests: every bound on a field of a JSON body, defined once.

``unparsed`` checks the bounds of a whole body before it is parsed, ``check_bounds`` those of its
fields before it is validated.  docs/limits.md lists ``BOUNDS``; other fields have the bounds of
``OTHER_FIELDS``.

Costs: some 100 ns per field; for lists and mappings with bounds on elements, as much per element.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any, Final, NamedTuple

from pagedserve.errors import TOO_LONG, RequestError
from pagedserve.lora.request import MAX_NAME_CHARACTERS
from pagedserve.regular_files import MAX_PATH_CHARACTERS
from pagedserve.sampling_params.structured_outputs import MAX_CHARS, MAX_CHOICES

# Bodies up to this many bytes are read in the event loop, and not counted among the open ones.
SMALL_BODY_BYTES: Final = 64 << 10
# Strings, names, lists and objects of a body.  Twice the model's length if that is more.
MAX_STRINGS: Final = 1 << 16
# Approximate number of values of a body: commas and opening brackets outside strings.  A batch of
# token ids is nearly all numbers, which cost less than strings and objects.
MAX_VALUES: Final = 1 << 21
# Nesting depth of lists and objects.
MAX_DEPTH: Final = 128
# Digits of a number; Python itself accepts no more.
MAX_DIGITS: Final = 4300
# Number of files of a form, of its other fields, and bytes of each of these.
MAX_FORM_FILES: Final = 1
MAX_FORM_FIELDS: Final = 64
MAX_FORM_BYTES: Final = 1 << 20
# Prompts per request, as at OpenAI.
MAX_PROMPTS: Final = 2048
# Log-probabilities of prompt tokens in all choices of a completion, some 256 MiB.
MAX_PROMPT_LOGPROBS: Final = 1 << 22
# Characters of a request id, which is in the log and in every chunk of a stream.
MAX_ID_CHARS: Final = 256
# Characters per token; meaningful text has fewer.
CHARS_PER_TOKEN: Final = 16
# Bits of an integer that are at least a digit of its text.
_BITS_PER_DIGIT: Final = 4
# Bytes per character: JSON may escape one as two surrogates.
BYTES_PER_CHAR: Final = 12


class Bound(NamedTuple):
    """Maximum size of a field.

    Attributes:
        path: Path of the field, with ``[]`` for each element of a list or a mapping.
        most: Maximum; a string names a size of the model.
        unit: Unit: ``characters`` for strings, any other for lists and mappings.
    """

    path: str
    most: int | str
    unit: str


VOCABULARY: Final = "the vocabulary's size"
MODEL_LENGTH: Final = "the model's length"

BOUNDS: Final = (
    Bound("model", 1024, "characters"),
    Bound("cache_salt", 1024, "characters"),
    Bound("prompt", MAX_PROMPTS, "prompts"),
    Bound("input", MAX_PROMPTS, "prompts or items"),
    Bound("stop", 1024, "characters"),
    Bound("stop", 64, "strings"),  # each is searched in every text
    Bound("stop[]", 1024, "characters"),
    Bound("stop_sequences", 64, "strings"),
    Bound("stop_sequences[]", 1024, "characters"),
    Bound("options.stop", 1024, "characters"),  # of Ollama
    Bound("options.stop", 64, "strings"),
    Bound("options.stop[]", 1024, "characters"),
    Bound("stop_token_ids", 1024, "token ids"),
    Bound("allowed_token_ids", VOCABULARY, "token ids"),
    Bound("logit_bias", 1024, "token ids"),
    Bound("bad_words", 1024, "words"),
    Bound("bad_words[]", 256, "characters"),
    Bound("guided_choice", MAX_CHOICES, "choices"),
    Bound("guided_choice[]", MAX_CHARS, "characters"),
    Bound("guided_json", MAX_CHARS, "characters"),
    Bound("guided_regex", MAX_CHARS, "characters"),
    Bound("guided_grammar", MAX_CHARS, "characters"),
    Bound("structured_outputs.choice", MAX_CHOICES, "choices"),
    Bound("structured_outputs.choice[]", MAX_CHARS, "characters"),
    Bound("structured_outputs.json", MAX_CHARS, "characters"),
    Bound("structured_outputs.regex", MAX_CHARS, "characters"),
    Bound("structured_outputs.grammar", MAX_CHARS, "characters"),
    Bound("messages", 4096, "messages"),
    Bound("messages[].role", 64, "characters"),
    Bound("messages[].name", 256, "characters"),
    Bound("messages[].tool_call_id", 256, "characters"),
    Bound("messages[].content", 1024, "parts"),
    Bound("messages[].tool_calls", 512, "calls"),
    Bound("system", 1024, "parts"),
    Bound("state", MODEL_LENGTH, "elements"),
    Bound("chat_template", 1 << 18, "characters"),
    Bound("chat_template_kwargs", 128, "variables"),
    Bound("chat_template_args", 128, "variables"),  # another name of it
    Bound("tools", 512, "tools"),
    Bound("text_1", 1024, "texts"),
    Bound("text_2", 1024, "texts"),
    Bound("queries", 1024, "texts"),
    Bound("items", 1024, "texts"),
    Bound("data_1", 1024, "texts"),
    Bound("data_2", 1024, "texts"),
    Bound("documents", 1024, "documents"),
    Bound("tokens", MODEL_LENGTH, "token ids"),
    Bound("request_ids", 1024, "ids"),
    Bound("request_ids[]", MAX_ID_CHARS + 32, "characters"),
    Bound("lora_name", MAX_NAME_CHARACTERS, "characters"),
    Bound("lora_path", MAX_PATH_CHARACTERS, "characters"),
)

# Characters of the longest string in ``BOUNDS``.
MAX_FIELD_CHARS: Final = max(
    bound.most for bound in BOUNDS if bound.unit == "characters" and isinstance(bound.most, int)
)

# Fields whose length is bounded by the model's context: 16 characters per token.
TEXT_FIELDS: Final = frozenset(
    {
        *("prompt", "content", "suffix", "input", "instructions", "query", "text_1", "text_2"),
        *("queries", "documents", "items", "data_1", "data_2"),
        *("messages", "system", "state"),
    }
)
# Other fields, and the body itself.
OTHER_FIELDS: Final = {"characters": 1 << 16, "elements": 1024}


@dataclass(slots=True)
class _Rule:
    """Bounds of a value and of its elements.

    Attributes:
        characters: Maximum of a string; None is unlimited.
        elements: Maximum of a list or mapping.
        unit: Name of its elements.
        fields: Rules of an object's fields.
        each: Rule of each element.
    """

    characters: int | str | None = None
    elements: int | str = OTHER_FIELDS["elements"]
    unit: str = "elements"
    fields: "dict[str, _Rule]" = field(default_factory=dict)
    each: "_Rule | None" = None


def _rules() -> dict[str, _Rule]:
    root = _Rule()
    for bound in BOUNDS:
        rule = root
        for name in bound.path.split("."):
            rule = rule.fields.setdefault(name.removesuffix("[]"), _Rule())
            if name.endswith("[]"):
                rule.each = rule = rule.each or _Rule()
        if bound.unit == "characters":
            rule.characters = bound.most
        else:
            rule.elements, rule.unit = bound.most, bound.unit
    return root.fields


_RULES: Final = _rules()
_OTHER: Final = _Rule(OTHER_FIELDS["characters"])
_TEXT: Final = _Rule()
# Types of content parts, besides results of tools, that are text.
_TEXT_PARTS: Final = (None, "text", "refusal", "thinking", "tool_use")


def check_bounds(body: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Refuse a body whose first invalid field exceeds its bound.

    Args:
        body: Body as sent.
        sizes: Values of the strings in ``Bound.most``; a missing one sets no bound.

    Raises:
        RequestError: Names the field, its size, and what is accepted.
    """
    if len(body) > OTHER_FIELDS["elements"]:
        raise RequestError(
            f"the body has {len(body)} fields; at most {OTHER_FIELDS['elements']} are accepted"
        )
    for name, value in body.items():
        kind = type(value)
        if kind is str or kind is list or kind is dict:
            rule = _RULES.get(name) or (_TEXT if name in TEXT_FIELDS else _OTHER)
            _check(value, rule, name, sizes)


def _check(value: Any, rule: _Rule, name: str, sizes: Mapping[str, int]) -> None:
    if isinstance(value, str):
        _check_size(len(value), rule.characters, name, "characters", sizes)
        return
    if not isinstance(value, list | dict):
        return
    if not (value and name in ("prompt", "input") and _is_one_prompt(value)):
        _check_size(len(value), rule.elements, name, rule.unit, sizes)
    if rule.each is not None:
        places: Iterator[Any] = iter(value) if isinstance(value, dict) else count()
        for item, place in zip(
            value.values() if isinstance(value, dict) else value, places, strict=False
        ):
            if isinstance(item, str | list | dict):
                _check(item, rule.each, f"{name}[{place}]", sizes)
    elif isinstance(value, dict):
        for key, inner in rule.fields.items():
            if (item := value.get(key)) is not None:
                _check(item, inner, f"{name}.{key}", sizes)


def _is_one_prompt(value: Any) -> bool:
    """Whether a list is the token ids of one prompt, which the engine limits."""
    return isinstance(value, list) and isinstance(value[0], int)


def _check_size(
    size: int, most: int | str | None, name: str, unit: str, sizes: Mapping[str, int]
) -> None:
    if isinstance(most, str):
        most = sizes.get(most)
    if most is not None and size > most:
        shown = name if len(name) <= MAX_ID_CHARS else f"{name[:MAX_ID_CHARS]}..."
        field_name = shown.partition("[")[0].partition(".")[0]
        raise RequestError(
            f"{shown} has {size} {unit}; at most {most} are accepted", param=field_name
        )


def check_texts(body: Mapping[str, Any], most: int) -> None:
    """Refuse a conversation with too many characters to render; see ``num_rendered``.

    Raises:
        RequestError: It has more than ``most``, which is ``CHARS_PER_TOKEN`` per token.
    """
    if (size := num_rendered(body)) > most:
        raise RequestError(
            TOO_LONG.format(
                found=f"messages has {size} characters; at most {most} are accepted",
                max_model_len=most // CHARS_PER_TOKEN,
            ),
            param="messages",
        )


def num_rendered(body: Mapping[str, Any]) -> int:
    """Number of characters that a template gets: of messages, except images, tools and variables.

    It is 0 without messages.
    """
    names = ("system", "tools", "chat_template_kwargs", "chat_template_args")
    shown = [body.get(name) for name in names]
    messages = body.get("messages")
    if not isinstance(messages, list):
        return 0
    for message in messages:
        if not isinstance(message, dict):
            continue
        for name, value in message.items():
            shown.append(name)
            if name != "images":  # of Ollama's messages
                shown += _without_images(value) if name == "content" else [value]
    return _num_characters(shown)


def _without_images(content: Any) -> Iterator[Any]:
    """Content that is passed to the template, which images are not; other parts are refused."""
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_result":
            yield from _without_images(part.get("content"))
        elif kind in _TEXT_PARTS:
            yield part


def check_schema(name: str, schema: Any, num_bytes: int) -> None:
    """Refuse a schema that is nested too deeply, or whose text would be too long to write.

    Args:
        name: Field of the request.
        schema: The schema.
        num_bytes: Bytes of the body; a small one takes no time to write.

    Raises:
        RequestError: It has more than ``MAX_DEPTH`` levels, or ``MAX_CHARS`` characters.
    """
    if _is_deeper(schema, MAX_DEPTH):
        raise RequestError(
            f"{name} is nested deeper than {MAX_DEPTH} lists and objects", param=name
        )
    if num_bytes > SMALL_BODY_BYTES and _num_characters([schema], MAX_CHARS) > MAX_CHARS:
        raise RequestError(
            f"{name} has more than {MAX_CHARS} characters; at most {MAX_CHARS} are accepted",
            param=name,
        )


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested deeper than ``most`` levels."""
    level = [value]
    for _ in range(most):
        parts = (part for whole in level for part in _parts(whole))
        level = [part for part in parts if isinstance(part, list | dict)]
    return bool(level)


def _parts(value: Any) -> Iterable[Any]:
    """Values within a list or an object."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _num_characters(values: list[Any], enough: float = inf) -> int:
    """Number of characters of the JSON of values, at least: without quotes and escapes.

    Counting stops above ``enough``.
    """
    size = 0
    while values and size <= enough:
        value = values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, int):
            size += value.bit_length() // _BITS_PER_DIGIT
        elif isinstance(value, list):
            size += 2 * len(value)  # brackets and commas
            values += value
        elif isinstance(value, dict):
            size += 2 * len(value)
            values += value.keys()
            values += value.values()
    return size
