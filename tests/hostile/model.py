"""The model that the stress is served by: a tiny Llama whose tokens are bytes, and adapters of it.

Bytes, so that every grammar has tokens to choose from.
"""

import json
from pathlib import Path
from typing import Any, Final

from tests.support.adapter_files import save_adapter
from tests.support.formula import EOS, VOCAB_SIZE, byte_tokenizer
from tests.support.tiny import save_llama_weights

MAX_MODEL_LEN: Final = 512
# The adapter with a pattern that a regular expression's engine takes years for.
EXPLODING: Final = "rank-pattern"
# Shows roles, contents and tools, as templates with tools do.
TEMPLATE: Final = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_byte_llama(directory: Path) -> Path:
    """Save the model; the directory."""
    save_llama_weights(
        directory,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    byte_tokenizer().save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


# Configurations that no adapter has, by what is wrong with them; each lies beside good weights.
_BAD_CONFIGS: Final[dict[str, str]] = {
    EXPLODING: json.dumps({"rank_pattern": {"(([a-z._0-9])+.?)+X": 4}}),
    "rank-huge": json.dumps({"r": 10**30}),
    "rank-text": json.dumps({"r": "4"}),
    "nested": "[" * 100_000,
    "no-json": "{",
    "list": "[]",
    "nan": '{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}',
}


def save_adapters(directory: Path) -> Path:
    """Save one good adapter and some that must be refused, each in a directory of its own."""
    directory.mkdir()
    shapes = {"model.layers.0.self_attn.q_proj": (64, 64)}
    for number, name in enumerate(["good", "cut", *_BAD_CONFIGS], start=1):
        save_adapter(directory / name, shapes, rank=4, number=number)
    weights = directory / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    good: dict[str, Any] = json.loads((directory / "good" / "adapter_config.json").read_text())
    for name, text in _BAD_CONFIGS.items():
        (directory / name / "adapter_config.json").write_text(text)
    exploding = good | json.loads(_BAD_CONFIGS[EXPLODING])
    (directory / EXPLODING / "adapter_config.json").write_text(json.dumps(exploding))
    return directory
