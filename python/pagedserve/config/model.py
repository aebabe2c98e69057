"""``ModelArgs``: options for the model and its files."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.config.options import Option, option

LoadFormat: TypeAlias = Literal["auto", "safetensors", "dummy"]
RunnerType: TypeAlias = Literal["auto", "generate", "pooling"]


def _model(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        checks.refuse(name, value, "smollm2, a directory, a .gguf file or a hub id")
    return value


def _hf_token(name: str, value: object) -> str | None:
    return None if value is None or value is True else checks.text(name, value)


@dataclass(kw_only=True)
class ModelArgs:
    """The options of ``EngineArgs`` for the model and its files."""

    model: str = field(
        kw_only=False,
        metadata={
            "option": Option(
                check=_model,
                text="smollm2, a local directory in Hugging Face format, a .gguf file or a hub id.",
                concern="model",
            )
        },
    )
    runner: RunnerType = option(
        "auto",
        checks.choice(get_args(RunnerType)),
        "What the model computes: generate produces tokens, pooling one vector per prompt. auto is "
        "pooling for sentence-transformers models, for models without a head and for classifiers, "
        "else generate.",
        concern="model",
    )
    tokenizer: str | None = option(
        None,
        checks.optional(checks.text),
        "Local directory or hub id of another tokenizer with the same vocabulary.",
        concern="model",
        unset="the model's own",
    )
    revision: str | None = option(
        None,
        checks.optional(checks.text),
        "Branch, tag or commit of the model's hub repository.",
        concern="model",
        unset="the main branch",
    )
    tokenizer_revision: str | None = option(
        None,
        checks.optional(checks.text),
        "Branch, tag or commit of the tokenizer's hub repository.",
        concern="model",
        unset="revision if tokenizer is not given, else the main branch",
    )
    hf_token: str | None = option(
        None,
        _hf_token,
        "Access token for hubs; in Python True is the same as None.",
        concern="model",
        unset="that of HF_TOKEN or hf auth login",
        converts=Literal[True],
        is_secret=True,
    )
    download_dir: str | None = option(
        None,
        checks.optional(checks.text),
        "Directory for files downloaded from hubs.",
        concern="model",
        unset="the hub's own cache directory",
    )
    use_tqdm_on_load: bool = option(
        True,
        checks.flag,
        "Report on stderr, or in the log, what is being loaded and how much of it is done.",
        concern="model",
    )
    load_format: LoadFormat = option(
        "auto",
        checks.choice(get_args(LoadFormat)),
        "Source of the weights: auto reads any supported files, safetensors only files of that "
        "format, dummy draws random weights from the seed, for benchmarks, and needs a directory "
        "with a config.json alone.",
        concern="model",
    )
