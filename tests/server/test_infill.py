"""``suffix``: text between a prompt and what follows it, by the tokens of a model's family."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedserve import RequestError
from pagedserve.server.completions.infill import infill_format
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served
from tests.support.formula import FormulaModel

STARCODER: Final = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
# As the models' own pages show it: a prompt "P" and a suffix "S".
FAMILIES: Final = {
    "<fim_prefix>P<fim_suffix>S<fim_middle>": STARCODER,
    "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>": (
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"),
    ),
    "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>": (
        *("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ),
    "▁<PRE>P▁<SUF>S▁<MID>": ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    "[SUFFIX]S[PREFIX]P": ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
}


@pytest.mark.parametrize("shown", FAMILIES)
def test_each_family_has_its_form(shown: str) -> None:
    vocabulary = {token: number for number, token in enumerate(("<s>", *FAMILIES[shown]))}
    assert infill_format(vocabulary).rendered("P", "S") == shown
    del vocabulary[FAMILIES[shown][1]]
    with pytest.raises(RequestError, match="no fill-in-the-middle tokens"):
        infill_format(vocabulary)


def starcoder_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte but the first ones, in whose place are those of StarCoder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[len(STARCODER) :]
    vocabulary = {token: index for index, token in enumerate((*STARCODER, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*STARCODER, "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    formula = FormulaModel()
    formula.tokenizer = starcoder_tokenizer()
    args = ServerArgs(port=0, uvicorn_log_level="warning")
    with Served(partial(formula.engine), args) as running:
        yield running
        running.wait_until_idle()


def test_a_suffix_is_part_of_the_prompt(server: Served) -> None:
    given: dict[str, Any] = {"max_tokens": 8, "logprobs": 1}
    answer = server.complete(prompt=["ab", "xyz"], suffix="cd", **given).json()
    by_hand = [
        server.complete(prompt=f"<fim_prefix>{prompt}<fim_suffix>cd<fim_middle>", **given).json()
        for prompt in ("ab", "xyz")
    ]
    assert [choice["text"] for choice in answer["choices"]] == [
        other["choices"][0]["text"] for other in by_hand
    ]
    assert answer["usage"]["prompt_tokens"] == 3 + 2 + 2 + 3 + 3 + 2
    plain = server.complete(prompt="ab", suffix="", **given).json()
    assert plain["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": [40, 41]}, "suffix is given with token ids"),
        ({"prompt": "ab", "echo": True}, "suffix is given with echo True"),
        ({"prompt": "ab", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens 3"),
        ({"prompt": "ab", "suffix": "x" * 3000}, "suffix has 3000 characters"),
    ],
)
def test_what_needs_the_prompt_alone_is_refused(
    server: Served, given: dict[str, Any], message: str
) -> None:
    answer = server.complete(**({"suffix": "cd"} | given))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "suffix"


def test_a_model_without_the_tokens_refuses_a_suffix(shared: Served) -> None:
    answer = shared.complete(prompt="ab", suffix="cd")
    assert answer.status_code == 400
    assert "no fill-in-the-middle tokens" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "suffix"
