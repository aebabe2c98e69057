"""The tokenizer of a GGUF file, beside the one that transformers makes of the same file."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from pagedserve._core.cpu import read_texts
from pagedserve.errors import ModelLoadError
from pagedserve.models.load.convert import convert_tokenizer
from pagedserve.models.load.gguf_header import chat_template_of, end_token_ids, read_header
from pagedserve.models.tokenizer.gguf_tokenizer import SPLITS, tokenizer_of_gguf
from pagedserve.output.detokenizer import Detokenizer
from tests.support.tokenizer_kinds import (
    BYTES,
    SPECIAL,
    TEXTS,
    Pair,
    assert_same,
    byte_level,
    write_gguf,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
MIXED = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        st.sampled_from(["<s>", "<think>", "the", " ", "\n", "'S", "12"]),
    )
).map("".join)


def byte_level_fields(pre: str) -> dict[str, Any]:
    trained = byte_level()
    vocab = trained.get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<think>"]
    kinds = [CONTROL if token in SPECIAL else NORMAL for token in tokens]
    kinds[-1] = USER_DEFINED
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in tokens[len(SPECIAL) : -1]
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return {
        "tokenizer_pre": pre,
        "token_list": tokens,
        "token_types": kinds,
        "token_merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "chat_template": TEMPLATE,
    }


def sentencepiece_fields(more: list[str]) -> dict[str, Any]:
    """Words with scores that do not follow the ids, and tokens of every type."""
    words = [
        "\u2581",
        "t",
        "h",
        "e",
        "\u2581t",
        "th",
        "he",
        "the",
        "\u2581the",
        "\u2581th",
        "l",
        "o",
    ]
    words += ["lo", "o\u2581", "\u65e5", "\u65e5\u672c", "\u672c", ".", "1", "12", "2"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *words, "<think>", *more]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED]
    order = [(index * 7) % len(words) for index in range(len(words))]
    scores = [0.0] * 259 + [-float(place) for place in order] + [0.0] * (1 + len(more))
    return {
        "token_list": tokens,
        "token_types": kinds + [CONTROL if "<" in token else USER_DEFINED for token in more],
        "token_scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "chat_template": TEMPLATE,
    }


KINDS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    **{
        pre: ("llama", "gpt2", PreTrainedTokenizerFast, byte_level_fields(pre))
        for pre in ("smollm", "default", "llama-bpe", "tekken", "gpt-4o")
    },
    "bos": (
        *("llama", "gpt2", PreTrainedTokenizerFast),
        byte_level_fields("llama-bpe") | {"add_bos_token": True, "add_eos_token": True},
    ),
    "qwen2": ("qwen2", "gpt2", Qwen2Tokenizer, byte_level_fields("qwen2")),
    "llama": ("llama", "llama", PreTrainedTokenizerFast, sentencepiece_fields([])),
    "mistral": (
        *("llama", "llama", PreTrainedTokenizerFast),
        sentencepiece_fields([]) | {"add_bos_token": False},
    ),
    "phi3": ("phi3", "llama", PreTrainedTokenizerFast, sentencepiece_fields([])),
    "gemma": (
        *("gemma3", "llama", GemmaTokenizer),
        sentencepiece_fields(["  ", "   ", "\n\n", "<pad>", "<mask>", "<bos>", "<eos>"])
        | {"pad_token_id": 259 + 21 + 1 + 3},
    ),
}


# What llama.cpp reads of Llama 3 where the file does not say it, and transformers does not.
BEGINS = {"add_bos_token": True}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Ours, and what transformers reads in the copy that it saves."""
    directory = tmp_path_factory.mktemp("gguf")
    architecture, kind, cls, fields = KINDS[request.param]
    write_gguf(directory / "model.gguf", architecture, kind, **fields)
    more = BEGINS | fields if request.param == "llama-bpe" else fields
    write_gguf(directory / "theirs.gguf", architecture, kind, **more)
    cls.from_pretrained(directory, gguf_file="theirs.gguf").save_pretrained(directory / "copy")
    return tokenizer_of_gguf(directory / "model.gguf"), cls.from_pretrained(directory / "copy")


def assert_same_stream(pair: Pair, text: str) -> None:
    """As `assert_same`, and of a stream of the ids."""
    ours, theirs = pair
    ids = assert_same(pair, text)
    for skip in (True, False):
        stream = Detokenizer(ours, skip_special_tokens=skip).stream()
        for token in ids:
            stream = stream.advanced([token])
        assert stream.text + stream.rest() == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", [*TEXTS, "<think>the</think>", "the the  12", " the"])
def test_a_text_has_the_ids_of_transformers(pair: Pair, text: str) -> None:
    assert_same_stream(pair, text)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=MIXED)
def test_random_texts_have_the_ids_of_transformers(pair: Pair, text: str) -> None:
    assert_same_stream(pair, text)


def test_special_tokens_and_templates_are_those_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    known = ours.get_vocab()
    assert {token: known[token] for token in theirs.get_vocab() if token in known} == known
    assert all(id_ >= len(known) for token, id_ in theirs.get_vocab().items() if token not in known)
    named = theirs.special_tokens_map
    assert ours.special_tokens_map.items() <= named.items()
    for token in ours.added_tokens_decoder.items():
        assert repr(token[1]) == repr(theirs.added_tokens_decoder[token[0]])
    messages = [{"role": "user", "content": "the"}]
    text: Any = ours.apply_chat_template(messages, tokenize=False)
    assert text == theirs.apply_chat_template(messages, tokenize=False)


def test_a_word_of_llama_3_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    fields = byte_level_fields("llama-bpe") | {"token_merges": [], "add_bos_token": False}
    tokens = fields["token_list"]
    word = max((token for token in tokens if token.isascii() and token.isalpha()), key=len)
    for pre, num_tokens in (("llama-bpe", 1), ("gpt-4o", len(word))):
        path = tmp_path / f"{pre}.gguf"
        write_gguf(path, "llama", "gpt2", **fields | {"tokenizer_pre": pre})
        assert len(tokenizer_of_gguf(path)(word).input_ids) == num_tokens > 0
    assert len(word) > 1


def test_the_tokens_are_read_once_for_the_config_and_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = byte_level_fields("qwen2")
    write_gguf(tmp_path / "model.gguf", "qwen2", "gpt2", **fields)
    read: list[list[str]] = []

    def counted(content: bytes, *, big_endian: bool) -> list[str]:
        read.append(read_texts(content, big_endian=big_endian))
        return read[-1]

    monkeypatch.setattr("pagedserve.models.load.gguf_header.read_texts", counted)
    header = read_header(tmp_path / "model.gguf")
    end_token_ids(header.fields)
    tokenizer_of_gguf(tmp_path / "model.gguf", header)
    assert read == [fields["token_list"]]


def test_texts_are_split_as_by_transformers() -> None:
    known = {name: split for name, split in SPLITS.items() if split is not None}
    assert known == {name: GGUF_PRE_TOKENIZER_SPLITS[name] for name in known}
    assert not GGUF_PRE_TOKENIZER_SPLITS.keys() & (SPLITS.keys() - known.keys())


def test_special_tokens_outside_the_alphabet_of_bytes_are_whole(tmp_path: Path) -> None:
    fields = byte_level_fields("qwen2")
    fields["token_list"][1] = "<\uff5cbegin\u2581of\u2581text\uff5c>"
    write_gguf(tmp_path / "model.gguf", "qwen2", "gpt2", **(fields | {"add_bos_token": True}))
    tokenizer = tokenizer_of_gguf(tmp_path / "model.gguf")
    assert tokenizer("<\uff5cbegin\u2581of\u2581text\uff5c>").input_ids == [1, 1]
    assert tokenizer.decode([1]) == "<\uff5cbegin\u2581of\u2581text\uff5c>"


@pytest.mark.parametrize("is_converted", [False, True])
def test_no_space_is_added_where_the_file_says_so(tmp_path: Path, is_converted: bool) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "llama", **sentencepiece_fields([]), add_space_prefix=False)
    tokenizer: Any = converted(path) if is_converted else tokenizer_of_gguf(path)
    for text, tokens in (("the", ["the"]), (" the", ["\u2581the"])):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("is_converted", [False, True])
def test_chat_templates_have_names(tmp_path: Path, is_converted: bool) -> None:
    path = tmp_path / "model.gguf"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }} tool"},
    ]
    write_gguf(path, "llama", "gpt2", **byte_level_fields("smollm") | {"chat_template": named})
    tokenizer: Any = converted(path) if is_converted else tokenizer_of_gguf(path)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "the"}]
    for tools, expected in ((None, "plain"), ([tool], "with 1 tool")):
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert text == expected


def test_names_of_chat_templates_are_no_paths() -> None:
    with pytest.raises(ValueError, match=r"it has the chat template '\.\./a'; names have letters"):
        chat_template_of({"tokenizer.chat_template.../a": "text"})


def converted(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the converted copy, as transformers loads it."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    convert_tokenizer(path, read_header(path), path.parent)
    config.save_pretrained(path.parent)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent)
    return loaded


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("bert", {}, "its tokenizer is 'bert' .*accepted are 'gpt2' and 'llama'"),
        ("gpt2", {"tokenizer_pre": "unheard-of"}, "split as 'unheard-of' .*accepted are .*smollm"),
        ("gpt2", {"tokenizer_pre": "smollm"}, "its tokenizer cannot be read: 'tokens'"),
        ("llama", {"token_list": ["a"]}, "its tokenizer cannot be read: 'scores'"),
        (
            *("gpt2", {"token_list": ["a"], "token_merges": ["b c"]}),
            "its tokenizer cannot be read",
        ),
        (
            *("gpt2", {"token_list": ["a", "b"], "token_merges": ["a b", "a b c"]}),
            'its tokenizer cannot be read: "a b c" is no pair: it must have one space',
        ),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, kind: str, fields: dict[str, Any], said: str
) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", kind, **fields)
    with pytest.raises(ModelLoadError, match=said):
        tokenizer_of_gguf(tmp_path / "model.gguf")


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", "gpt2", **byte_level_fields("smollm"))
    content = (tmp_path / "model.gguf").read_bytes()
    for size in (0, 3, 10, 100, 5000, len(content) // 2):
        (tmp_path / "model.gguf").write_bytes(content[:size])
        with pytest.raises(ModelLoadError):
            tokenizer_of_gguf(tmp_path / "model.gguf")
