"""Which tokenizers are loaded without transformers where it is installed: those that are equal."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import GemmaTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from pagedserve.config import EngineArgs
from pagedserve.inputs.chat import chat_prompt
from pagedserve.models.tokenizer.fast_tokenizer import FastTokenizer
from pagedserve.models.tokenizer.loader import load_tokenizer
from tests.support.tokenizer_kinds import (
    BYTES,
    SPECIAL,
    TEMPLATE,
    TEXTS,
    Pair,
    assert_same,
    byte_level,
    save,
)

MIXED = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        st.sampled_from(["<s>", "<|user|>", "<tool>", "the", " ", "\n", "'S", "12"]),
    )
).map("".join)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}


def save_class(cls: Any, directory: Path) -> None:
    """Save a tokenizer of a class that makes every part but the vocabulary itself."""
    trained = json.loads(byte_level().to_str())["model"]
    vocab, merges = trained["vocab"], [tuple(merge) for merge in trained["merges"]]
    if cls is GemmaTokenizer:
        words = ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "\u2581t"]
        tokens = [*SPECIAL, "<mask>", *BYTES, *words]
        vocab = {token: index for index, token in enumerate(tokens)}
        merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "t")]
    cls(vocab=vocab, merges=merges, chat_template=TEMPLATE, **NAMED).save_pretrained(directory)


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))


def save_case(name: str, directory: Path, config: dict[str, Any]) -> EngineArgs:
    """Save the tokenizer of a case, with the config of a model without weights."""
    model_type, kind, options = CASES[name]
    if isinstance(kind, str):
        save(kind, directory)
    else:
        save_class(kind, directory)
    change(directory / "tokenizer_config.json", **options)
    (directory / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    return EngineArgs(str(directory), load_format="dummy")


UNNAMED = {"tokenizer_class": None}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", "byte_level", {}),
    "unnamed": ("smollm3", "byte_fallback", UNNAMED),
    "with Llama's class": ("llama", "byte_level", {"tokenizer_class": "LlamaTokenizerFast"}),
    "mistral": ("mistral", "byte_fallback", {"tokenizer_class": "LlamaTokenizer"}),
    "unnamed mistral": ("mistral", "byte_level", UNNAMED),
    "surrounded": ("llama", "byte_level", {"add_bos_token": True, "add_eos_token": True}),
    "qwen2": ("qwen2", Qwen2Tokenizer, {}),
    "misnamed qwen2": ("qwen2", Qwen2Tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "qwen3": ("qwen3", Qwen2Tokenizer, UNNAMED | {"add_bos_token": False}),
    "gemma": ("gemma", GemmaTokenizer, {}),
    "gemma3": ("gemma3_text", GemmaTokenizer, UNNAMED | {"add_bos_token": True}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest,
    tiny_config: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    """The tokenizer that is loaded, and transformers'."""
    args = save_case(request.param, tmp_path_factory.mktemp("tokenizer"), tiny_config)
    ours, theirs = load_tokenizer(args), load_tokenizer(args, uses_transformers=True)
    assert isinstance(theirs, PreTrainedTokenizerBase)
    assert isinstance(ours, FastTokenizer)
    return ours, theirs


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_ids_of_transformers(pair: Pair, text: str) -> None:
    assert_same(pair, text)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=MIXED)
def test_random_texts_have_the_ids_of_transformers(pair: Pair, text: str) -> None:
    assert_same(pair, text)


def test_vocabularies_and_templates_are_those_of_transformers(
    pair: Pair,
) -> None:
    ours, theirs = pair
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map.items() <= theirs.special_tokens_map.items()
    assert ours.eos_token_id == theirs.eos_token_id
    messages = [{"role": "user", "content": "the License"}]
    assert chat_prompt(ours, messages) == chat_prompt(theirs, messages)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"tokenizer_class": "GPT2Tokenizer"}),
        ("llama", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("qwen2", {}),
        ("gemma", UNNAMED),
        ("llama", {"split_special_tokens": True}),
        ("mistral", {"fix_mistral_regex": True}),
        ("gpt2", {}),
        ("qwen2_vl", {}),
    ],
)
def test_what_a_class_may_change_is_loaded_by_transformers(
    tmp_path: Path, tiny_config: dict[str, Any], model_type: str, options: dict[str, Any]
) -> None:
    save("byte_level", tmp_path)
    change(tmp_path / "tokenizer_config.json", **options)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"model_type": model_type}))
    tokenizer = load_tokenizer(EngineArgs(str(tmp_path), load_format="dummy"))
    assert isinstance(tokenizer, PreTrainedTokenizerBase)


def test_a_part_that_a_class_replaces_is_noticed(
    tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    save_class(Qwen2Tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"model_type": "qwen2"}))
    args = EngineArgs(str(tmp_path), load_format="dummy")
    file = tmp_path / "tokenizer.json"
    written = json.loads(file.read_text())
    digits = json.loads(pre_tokenizers.Digits(individual_digits=True).__getstate__())
    changes: list[dict[str, Any]] = [
        {"normalizer": None},
        {"pre_tokenizer": digits},
        {"decoder": {"type": "Fuse"}},
        {"model": written["model"] | {"ignore_merges": True}},
        {"model": written["model"] | {"byte_fallback": True}},
    ]
    for parts in changes:
        file.write_text(json.dumps(written | parts))
        assert isinstance(load_tokenizer(args), PreTrainedTokenizerBase), parts
    file.write_text(json.dumps(written))
    assert isinstance(load_tokenizer(args), FastTokenizer)


@pytest.mark.usefixtures("model_package")
def test_smollm2s_gguf_file_is_read_without_transformers() -> None:
    assert isinstance(load_tokenizer(EngineArgs("smollm2")), FastTokenizer)
