"""The tokenizer without transformers, beside that of transformers: ids, texts, renderings."""

import json
import pickle
import random
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, RequestError
from pagedserve.inputs.chat import chat_prompt
from pagedserve.models.tokenizer.fast_tokenizer import FastTokenizer
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.models.tokenizer.tokenizer_files import tokenizer_of_directory
from pagedserve.output.detokenizer import Detokenizer
from tests.support.tokenizer_kinds import KINDS, TEXTS, Pair, assert_same, save

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
MIXED = st.lists(
    st.one_of(TEXT, st.sampled_from(["<s>", "</s>", "<tool>", "<b>", " ", "\n", "\u2581", "1"]))
).map("".join)
SETTINGS = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Ours and transformers', of one directory."""
    directory = tmp_path_factory.mktemp("tokenizer")
    theirs = save(request.param, directory)
    return tokenizer_of_directory(directory), theirs


@pytest.fixture(scope="module")
def smollm2(real_tokenizer: Any) -> Pair:
    ours: Any = load_tokenizer(EngineArgs("smollm2"), uses_transformers=False)
    return ours, real_tokenizer


def streamed(tokenizer: Any, ids: list[int]) -> list[str]:
    stream, texts = Detokenizer(tokenizer, skip_special_tokens=False).stream(), []
    for token in ids:
        stream = stream.advanced([token])
        texts.append(stream.text)
    return [*texts, stream.rest()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_ids_of_transformers(pair: Pair, text: str) -> None:
    assert_same(pair, text)


@SETTINGS
@given(text=MIXED)
def test_random_texts_have_the_ids_of_transformers(pair: Pair, text: str) -> None:
    assert_same(pair, text)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2s_gguf_has_the_ids_of_transformers(smollm2: Pair, text: str) -> None:
    assert_same(smollm2, text)
    assert_same(smollm2, text.replace("<s>", "<|im_start|>").replace("</s>", "<|im_end|>"))


@SETTINGS
@given(text=MIXED)
def test_random_texts_have_the_ids_of_smollm2(smollm2: Pair, text: str) -> None:
    assert_same(smollm2, text)


@pytest.mark.parametrize("seed", range(20))
def test_random_ids_have_the_text_of_transformers(pair: Pair, smollm2: Pair, seed: int) -> None:
    draw = random.Random(seed)
    for ours, theirs in (pair, smollm2):
        size = len(theirs.get_vocab())
        ids = [draw.randrange(size + 3) for _ in range(50)]  # some without a token, or no UTF-8
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        assert streamed(ours, ids) == streamed(theirs, ids)


def test_vocabularies_and_special_tokens_are_those_of_transformers(
    pair: Pair, smollm2: Pair
) -> None:
    for ours, theirs in (pair, smollm2):
        assert ours.get_vocab() == theirs.get_vocab()
        assert {id_: repr(token) for id_, token in ours.added_tokens_decoder.items()} == {
            id_: repr(token) for id_, token in theirs.added_tokens_decoder.items()
        }
        assert ours.special_tokens_map == theirs.special_tokens_map
        assert ours.chat_template == theirs.chat_template
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("most", range(2, 12))
def test_texts_and_pairs_are_truncated_as_by_transformers(pair: Pair, most: int) -> None:
    ours, theirs = pair
    options: Any = {"truncation": True, "max_length": most + 2}
    long, short = "the terms of this License", "a copy"
    for texts in [(long,), (short,), (long, short), (short, long), (long, long), (long, "")]:
        expected = theirs(*texts, **options, return_token_type_ids=True)
        found = ours(*texts, **options)
        assert (found.input_ids, found["token_type_ids"]) == (
            expected.input_ids,
            expected["token_type_ids"],
        )
    assert ours(long).input_ids == theirs(long).input_ids  # and the next text is whole


BATCHES: list[tuple[Any, ...]] = [
    ("a copy",),
    ("a copy", "the License"),
    (["a copy"],),
    (["a copy", "the terms of this License"],),
    (("a copy", "the License", ""),),
    ([("a copy", "the License"), ["the terms", "of"]],),
    (["a copy", "the terms"], ["of this License", ""]),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_special_tokens": False, "return_attention_mask": True, "stride": 0, "padding": False},
    {"truncation": True, "max_length": 4},
    {"truncation": True},
    {"truncation": False, "max_length": 4},
    {"max_length": 4},
    {"padding": True},
    {"padding": "longest", "max_length": 4, "truncation": "longest_first"},
    {"padding": "max_length", "max_length": 12},
    {"padding": "max_length"},
]


@pytest.mark.parametrize("texts", BATCHES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_encoded_as_by_transformers(
    pair: Pair, texts: tuple[Any, ...], options: dict[str, Any], side: str
) -> None:
    ours, theirs = map(deepcopy, pair)
    for each in (ours, theirs):
        each.pad_token = "</s>"
        each.padding_side = each.truncation_side = side
    assert ours(*texts, **options) == theirs(*texts, **options, return_token_type_ids=True)
    assert ours.encode(*texts, **options) == theirs.encode(*texts, **options)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (("a",), {"return_tensors": "pt"}, "return_tensors is 'pt', which this tokenizer does not"),
        (("a",), {"padding": "widest"}, "padding is 'widest'; it must be one of True, 'longest'"),
        (("a",), {"truncation": "only_first"}, "truncation is 'only_first'; it must be one of"),
        (("a",), {"truncate": True}, "unexpected keyword argument 'truncate'"),
        (("a",), {"padding": True}, "padding needs pad_token; set it"),
        ((["a", "b"], "cd"), {}, "text is a list and text_pair a text; it must be a list too"),
        ((["a", "b"], ["c"]), {}, "shorter"),
        (([1, 2],), {}, "TextEncodeInput"),
    ],
)
def test_an_option_that_is_not_obeyed_is_refused(
    pair: Pair, texts: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pair[0](*texts, **options)


def test_tokens_are_looked_up_as_by_transformers(pair: Pair, smollm2: Pair) -> None:
    for ours, theirs in map(deepcopy, (pair, smollm2)):
        ids = theirs.encode("the License <tool>")
        assert len(ours) == len(theirs)
        assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
        assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
        assert ours.get_added_vocab() == theirs.get_added_vocab()
        for name in (
            *("bos_token", "eos_token", "unk_token", "pad_token", "pad_token_id", "mask_token_id"),
            *("vocab_size", "is_fast", "padding_side", "model_max_length", "extra_special_tokens"),
        ):
            assert getattr(ours, name) == getattr(theirs, name)
        for has_pair in (False, True):
            assert ours.num_special_tokens_to_add(has_pair) == theirs.num_special_tokens_to_add(
                has_pair
            )
        tokens = theirs.convert_ids_to_tokens(ids)
        assert ours.convert_ids_to_tokens(ids[1]) == tokens[1]
        assert ours.convert_ids_to_tokens(ids, True) == theirs.convert_ids_to_tokens(ids, True)
        assert ours.convert_tokens_to_ids(tokens[1]) == ids[1]
        assert ours.convert_tokens_to_ids([*tokens, "?!?"]) == theirs.convert_tokens_to_ids(
            [*tokens, "?!?"]
        )
        assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)
        assert ours.tokenize("the \u4e2d", "a") == theirs.tokenize("the \u4e2d", "a")
        ours.pad_token = theirs.pad_token = ours.eos_token
        assert ours.pad_token_id == theirs.pad_token_id == ours.eos_token_id
        ours.pad_token_id = theirs.pad_token_id = ids[1]
        assert ours.special_tokens_map == theirs.special_tokens_map


def test_several_texts_are_decoded_as_by_transformers(pair: Pair) -> None:
    ours, theirs = pair
    ids = theirs.encode("the License")
    for each in (ids, [ids, ids[:2]], [], ids[1], np.array([ids, ids]), [np.array(ids)]):
        assert ours.decode(each, True) == theirs.decode(each, True)
        assert ours.batch_decode(each) == theirs.batch_decode(each)
    assert ours.decode(ours("the License")) == theirs.decode(theirs("the License"))


def test_a_config_sets_what_transformers_reads_in_it(tmp_path: Path) -> None:
    save(
        "word_piece",
        tmp_path,
        truncation_side="left",
        padding_side="left",
        model_max_length=6,
        pad_token="<mask>",
        clean_up_tokenization_spaces=True,
        additional_special_tokens=["<extra>"],
        image_token="<image>",
        mask_token="<mask>",
    )
    ours, theirs = (
        tokenizer_of_directory(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.special_tokens_map["image_token"] == "<image>"
    text = "do not stop , it is <extra> <image> <mask> the end . "
    assert_same((ours, theirs), text)
    for options in ({"max_length": 4}, {"truncation": True}, {"padding": "max_length"}):
        assert ours.encode(text, **options) == theirs.encode(text, **options)
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    for name in ("mask_token_id", "extra_special_tokens", "name_or_path"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_older_files_beside_the_tokenizer_count(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name in ("added_tokens_decoder", "eos_token"):
        config.pop(name, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    number = len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({"<late>": number + 3, "<early>": number + 2})
    )
    eos = {"content": "<|user|>", "lstrip": False, "rstrip": False, "normalized": False}
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": eos | {"single_word": False}, "sep_token": "<late>"})
    )
    ours, theirs = (
        tokenizer_of_directory(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    assert ours.eos_token_id == theirs.eos_token_id == 3
    assert ours.get_vocab() == theirs.get_vocab()
    assert_same((ours, theirs), "x<late><early> <|user|>")


def test_templates_of_files_come_first(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools: {{ tools[0].name }}")
    ours, theirs = (
        tokenizer_of_directory(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"name": "f"}]
    for named in ({}, {"tools": tools}, {"tools": tools, "chat_template": "tool_use"}):
        options: Any = {"tokenize": False, **named}
        found: Any = ours.apply_chat_template(messages, **options)
        assert found == theirs.apply_chat_template(messages, **options)
    (tmp_path / "chat_template.jinja").unlink()
    for tokenizer in (
        tokenizer_of_directory(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    ):
        with pytest.raises(RequestError, match="default"):
            chat_prompt(tokenizer, messages)


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi <&> \u00e9 \U0001f642"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "one\ntwo ", "reasoning": "because", "tool_calls": None},
    ],
]
TEMPLATES = [
    None,
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}{% endfor %}",
    (
        "{%- for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n"
        "  {{- m['content'] | trim }}\n  {% break %}\n{%- endfor %}"
    ),
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}",
    "{{ dict(a=1) | tojson }}{{ dict.fromkeys(['x']) }}{{ strftime_now('%Y') }}",
    "{{ messages | tojson(indent=2, sort_keys=true) }}{{ tools | tojson }}{{ documents }}",
    "{{ mood }}{{ bos_token }}{{ eos_token }}{{ unk_token }}",
    "{% macro show(x) %}[{{ x }}]{% endmacro %}{{ show(messages[-1].content) }}{{ undefined_one }}",
    "{{ messages[0].content.upper() }}{{ messages[0]['role'] }}{{ 7 // 2 }}{{ none is none }}",
    "{{ raise_exception('no') }}",
    "{{ namespace(_a=1) }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% if %}",
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("continues", [True, False])
def test_conversations_are_rendered_as_by_transformers(
    pair: Pair, conversation: Any, template: str | None, continues: bool
) -> None:
    options: Any = {
        "chat_template": template,
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        "tools": [{"type": "function", "function": {"name": "f", "x": [1, None, "\u00e9"]}}],
        "chat_template_kwargs": {"documents": [{"title": "a", "text": "<b>"}], "mood": "good"},
    }
    outcomes: list[Any] = []
    for tokenizer in pair:
        try:
            outcomes.append(chat_prompt(tokenizer, conversation, **options))
        except RequestError as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


def test_smollm2s_conversations_are_rendered_as_by_transformers(smollm2: Pair) -> None:
    for conversation in CONVERSATIONS:
        ours, theirs = (chat_prompt(tokenizer, conversation) for tokenizer in smollm2)
        assert ours == theirs
    rendered: Any = smollm2[0].apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True)
    expected = smollm2[1].apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True)
    assert rendered.input_ids == expected.input_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokenize": False, "return_tensors": "pt"},
        {"return_dict": False, "truncation": True, "max_length": 5},
        {"padding": True},
        {"tokenizer_kwargs": {"return_attention_mask": True}},
    ],
)
def test_several_conversations_are_rendered_as_by_transformers(
    pair: Pair, options: dict[str, Any]
) -> None:
    ours, theirs = map(deepcopy, pair)
    ours.pad_token = theirs.pad_token = "</s>"
    for conversations in (CONVERSATIONS[0], CONVERSATIONS):
        found, expected = (
            each.apply_chat_template(conversations, **options) for each in (ours, theirs)
        )
        if isinstance(found, dict):
            found.pop("token_type_ids")
        assert found == expected
    assert ours.get_chat_template() == theirs.get_chat_template()


@pytest.mark.parametrize(
    "options",
    [
        {"return_tensors": "pt"},
        {"return_assistant_tokens_mask": True},
        {"sanitize_control_tokens": True},
        {"tokenizer_kwargs": {"stride": 2}},
    ],
)
def test_an_option_of_conversations_that_is_not_obeyed_is_refused(
    pair: Pair, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="which this tokenizer does not support; leave it out"):
        pair[0].apply_chat_template(CONVERSATIONS[0], **options)


def test_a_template_has_the_limits_of_all_templates(smollm2: Pair) -> None:
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="it takes more than 1000000 steps"):
        chat_prompt(smollm2[0], CONVERSATIONS[0], chat_template=template)


def test_variables_of_a_template_have_any_name(smollm2: Pair) -> None:
    template = "{{ variables }} {{ options }}"
    given = {"variables": 1, "options": 2}
    prompt = chat_prompt(
        smollm2[0], CONVERSATIONS[0], chat_template=template, chat_template_kwargs=given
    )
    assert prompt["prompt"] == "1 2"


def test_a_tokenizer_can_be_sent_to_another_process(pair: Pair) -> None:
    copy = pickle.loads(pickle.dumps(pair[0]))  # noqa: S301  # made here
    assert copy.encode("the License") == pair[0].encode("the License")
    assert copy.special_tokens_map == pair[0].special_tokens_map


def test_a_tokenizer_that_only_transformers_reads_is_refused_by_name(
    tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "vocab.txt").write_text("a\n")
    args = EngineArgs(str(tmp_path))
    with pytest.raises(ModelLoadError, match=f"model '{tmp_path}' .*tokenizer.json.*pip install"):
        load_tokenizer(args, uses_transformers=False)
    save("byte_level", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["a.B", null]}}'
    )
    with pytest.raises(ModelLoadError, match="code of the model's repository, which is never run"):
        load_tokenizer(args, uses_transformers=False)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", ["", "[" * 10**5, "[1]", '{"a": ', '{"bos_token": 5}', '{"auto_map": 5}']
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, tiny_config: dict[str, Any], file: str, content: str
) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelLoadError, match=f"model '{tmp_path}' has no tokenizer that can be"):
        load_tokenizer(EngineArgs(str(tmp_path)), uses_transformers=False)


@pytest.mark.parametrize("uses_transformers", [False, True])
def test_a_file_with_which_the_library_panics_is_refused(
    tmp_path: Path, tiny_config: dict[str, Any], *, uses_transformers: bool
) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    token = {"SpecialToken": {"id": "[NO]", "type_id": 0}}
    template = {"single": [token], "pair": [token], "special_tokens": {}}
    content["post_processor"] = {"type": "TemplateProcessing"} | template
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="its tokenizer cannot be used: PanicException"):
        load_tokenizer(EngineArgs(str(tmp_path)), uses_transformers=uses_transformers)


def test_without_transformers_ours_is_chosen(
    tmp_path: Path, tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    args = EngineArgs(str(tmp_path), load_format="dummy")
    options = json.loads((tmp_path / "tokenizer_config.json").read_text())
    # Which would replace the pre-tokenizer of another kind.
    options["tokenizer_class"] = "GPT2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert isinstance(load_tokenizer(args), PreTrainedTokenizerFast)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert isinstance(load_tokenizer(args), FastTokenizer)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    assert load_tokenizer(args)("5 17").input_ids == [5, 17]
