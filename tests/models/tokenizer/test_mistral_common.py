"""Tokenizers in mistral-common's format, against mistral-common itself, and what is without it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from pagedserve.config import EngineArgs
from pagedserve.inputs.chat import chat_prompt
from pagedserve.models.tokenizer.loader import load_tokenizer

TEXTS = ["Hello  wörld, 你好!", " two\n\n\tTabs   three 1234", "🙂 ", "don't_stop", ""]
CONVERSATIONS = [
    [{"role": "user", "content": "hi there"}],
    [
        {"role": "system", "content": "be  brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": " why "},
    ],
]
LOAD = """
import sys
from pagedserve.config import EngineArgs
from pagedserve.models.tokenizer.loader import load_tokenizer
print(load_tokenizer(EngineArgs(sys.argv[1]))("w5").input_ids)
"""


def test_a_tekken_file_encodes_and_renders_as_mistral_common_does(tmp_path: Path) -> None:
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
    requests: Any = pytest.importorskip("mistral_common.protocol.instruct.request")
    tokenizers: Any = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    shutil.copy(data / "tekken_240911.json", tmp_path / "tekken.json")
    MistralConfig().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(EngineArgs(str(tmp_path), load_format="dummy"))
    exact = tokenizers.MistralTokenizer.from_file(tmp_path / "tekken.json")
    for text in TEXTS:
        ids = exact.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for conversation in CONVERSATIONS:
        request = requests.ChatCompletionRequest(messages=conversation)
        found = chat_prompt(tokenizer, conversation)["prompt_token_ids"]
        assert found == exact.encode_chat_completion(request).tokens
    assert tokenizer.eos_token_id == exact.instruct_tokenizer.tokenizer.eos_id


def test_a_tokenizer_json_needs_nothing_of_mistral_common(
    save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("PIL.Image")  # without which transformers looks for no mistral-common
    directory = save_tiny("mistral")
    # As it is installed where what it needs is not.
    broken = tmp_path / "broken" / "mistral_common"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('__version__ = "99.0"\n')
    information = broken.with_name("mistral_common-99.0.dist-info")
    information.mkdir()
    (information / "METADATA").write_text("Name: mistral-common\nVersion: 99.0\n")
    path = os.pathsep.join([str(broken.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(directory)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[5]\n", done.stderr
