"""``text_offset``: where in the shown text each token begins."""

from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.server.conftest import Serve, Served
from tests.server.test_completions import encode, events
from tests.support.formula import EOS, FormulaModel, byte_tokenizer

EMOJI = "a🎉b"


def pieces(choice: dict[str, Any]) -> list[str]:
    """What each token added to the text, by the offsets."""
    ends = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    return [choice["text"][start:end] for start, end in pairwise(ends)]


def both(served: Served, **body: Any) -> dict[str, Any]:
    """A choice of a whole answer, which is that of a stream too."""
    body = {"logprobs": 0, "max_tokens": 0, "echo": True} | body
    answer = served.complete(**body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    parts = [event["choices"][0] for event in events(served.complete(**body, stream=True))]
    assert "".join(part["text"] for part in parts) == choice["text"]
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]
    return choice


@pytest.mark.parametrize("prompt", [EMOJI, encode(EMOJI)])
def test_of_a_character_the_last_token_has_the_text(shared: Served, prompt: Any) -> None:
    choice = both(shared, prompt=prompt)
    assert choice["text"] == EMOJI
    assert pieces(choice) == ["a", "", "", "", "🎉", "b"]


def test_new_tokens_that_make_characters(shared: Served) -> None:
    data = encode("é")
    body = {"prompt": "x", "max_tokens": 1, "allowed_token_ids": data[:1]}
    choice = both(shared, **body)
    assert pieces(choice) == ["x", "\ufffd"]
    choice = both(shared, **body, echo=False)
    assert (choice["text"], pieces(choice)) == ("\ufffd", ["\ufffd"])
    choice = both(shared, prompt="x", max_tokens=40)
    assert "".join(pieces(choice)) == choice["text"]
    own = both(shared, prompt="x", max_tokens=40, echo=False)
    assert [offset + 1 for offset in own["logprobs"]["text_offset"]] == (
        choice["logprobs"]["text_offset"][1:]
    )


@pytest.mark.parametrize(
    ("prompt", "more", "wanted"),
    [
        ("a<|end|>b", {}, ["a", "<|end|>", "b"]),
        ([*encode("a"), EOS, *encode("b")], {}, ["a", "", "b"]),
        (
            [*encode("a"), EOS, *encode("b")],
            {"skip_special_tokens": False},
            ["a", "<|end|>", "b"],
        ),
        ("a<|end|>b", {"truncate_prompt_tokens": 2}, ["", "b"]),
    ],
)
def test_special_tokens_are_where_they_are_shown(
    shared: Served, prompt: Any, more: dict[str, Any], wanted: list[str]
) -> None:
    assert pieces(both(shared, prompt=prompt, **more)) == wanted


def test_a_special_token_that_is_made_is_shown_or_not(shared: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "allowed_token_ids": [EOS], "ignore_eos": True}
    assert pieces(both(shared, **body)) == ["a", "b", "", ""]
    shown = both(shared, **body, skip_special_tokens=False)
    assert pieces(shown) == ["a", "b", "<|end|>", "<|end|>"]


def test_a_token_that_the_tokenizer_adds_has_no_place(serve: Serve, formula: FormulaModel) -> None:
    backend = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", EOS)]
    )
    formula.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    with serve() as served:
        for prompt, wanted in (("ab", ["", "a", "b"]), ("a<|end|>", ["", "a", "<|end|>"])):
            choice = both(served, prompt=prompt)
            assert (choice["text"], pieces(choice)) == (prompt, wanted)
        plain = both(served, prompt="ab", add_special_tokens=False)
        assert pieces(plain) == ["a", "b"]


def test_what_a_stop_string_takes_away_has_no_text(shared: Served, formula: FormulaModel) -> None:
    prompt = "ab"
    text = both(shared, prompt=prompt, max_tokens=12)["text"]
    choice = both(shared, prompt=prompt, max_tokens=12, stop=[text[6:9]])
    assert choice["text"] == text[: text.find(text[6:9], 2)]
    assert "".join(pieces(choice)) == choice["text"]
