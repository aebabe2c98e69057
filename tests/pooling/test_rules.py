"""Files of sentence-transformers that somebody sent: what cannot be is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedserve.errors import ModelLoadError
from pagedserve.pooling.rules import MODULES_FILE, has_rules, read_rules

MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / MODULES_FILE).write_text(json.dumps(MODULES))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    return tmp_path


def test_rules_are_read(directory: Path) -> None:
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    rules = read_rules(directory)
    assert (rules.pooling_type, rules.max_seq_length, rules.normalize) == ("CLS", 32, False)


def test_the_first_file_of_options_is_read(directory: Path) -> None:
    (directory / "sentence_xlnet_config.json").write_text('{"max_seq_length": 16}')
    assert read_rules(directory).max_seq_length == 16
    options = '{"max_seq_length": 32, "do_lower_case": true}'
    (directory / "sentence_roberta_config.json").write_text(options)
    rules = read_rules(directory)
    assert (rules.max_seq_length, rules.lowercases) == (32, True)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (MODULES_FILE, [5], r"modules.json has 5; it must be a list of parts"),
        (MODULES_FILE, {"a": 1}, "modules.json has {'a': 1}; it must be a list"),
        (MODULES_FILE, [{"type": 5, "path": ""}], "it must be a list of parts, each with a type"),
        (MODULES_FILE, [*MODULES[:1], {"type": "Pooling", "path": "../x"}], "within the model's"),
        (MODULES_FILE, [*MODULES[:1], {"type": "Pooling", "path": "/etc"}], "within the model's"),
        ("1_Pooling/config.json", [1], "config.json is no JSON object"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length is '-1'; it must be"),
        ("sentence_bert_config.json", {"max_seq_length": "9"}, "max_seq_length is '9'; it must be"),
        ("sentence_bert_config.json", {"do_lower_case": 1}, "do_lower_case is '1'; it must be"),
        ("config_sentence_transformers.json", {"prompts": [1]}, r"prompts is \[1\]; it must give"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"a": 1}},
            "prompts is {'a': 1}; it must",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": 5}, "_name is 5; it must be"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "a"}, "default_prompt_name": "document"},
            r"_name is 'document', which prompts does not have; it has \['query'\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(directory: Path, file: str, content: Any, said: str) -> None:
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=said):
        read_rules(directory)


def test_a_deep_file_is_refused(directory: Path) -> None:
    (directory / MODULES_FILE).write_text("[" * 10**5)
    assert has_rules(directory)
    with pytest.raises(ModelLoadError, match="nested deeper than 100 levels"):
        read_rules(directory)
