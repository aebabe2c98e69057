"""``ModelArgs``: which model, where its files come from, and how they are read."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.options import Option, option

LoadFormat: TypeAlias = Literal["auto", "safetensors", "dummy"]
RunnerType: TypeAlias = Literal["auto", "generate", "pooling"]


def _model(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        checks.refuse(name, value, "smollm2, a directory, a .gguf file or a hub id")
    return value


def _hf_token(name: str, value: object) -> str | None:
    return None if value is None or value is True else checks.text(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """The options of ``EngineArgs``, which checks them, that are about a model's files."""

    model: str = field(
        kw_only=False,
        metadata={
            "option": Option(
                check=_model,
                text="smollm2, a local directory in Hugging Face format, a .gguf file or a hub id.",
            )
        },
    )
    runner: RunnerType = option(
        "auto",
        checks.choice(get_args(RunnerType)),
        "generate makes tokens, pooling makes one vector of a prompt; auto is pooling for models "
        "with the files of sentence-transformers, without a head or with one that names classes, "
        "else generate.",
    )
    tokenizer: str | None = option(
        None,
        checks.optional(checks.text),
        "A local directory or a hub id with another tokenizer for the same vocabulary.",
        unset="the model's own",
    )
    revision: str | None = option(
        None,
        checks.optional(checks.text),
        "Branch, tag or commit of a hub id.",
        unset="the main branch",
    )
    tokenizer_revision: str | None = option(
        None,
        checks.optional(checks.text),
        "The same of the tokenizer's.",
        unset="revision where the model brings the tokenizer, else the main branch",
    )
    hf_token: str | None = option(
        None,
        _hf_token,
        "Token that hubs are shown; True is what None stands for.",
        unset="that of HF_TOKEN or hf auth login",
        is_secret=True,
    )
    download_dir: str | None = option(
        None,
        checks.optional(checks.text),
        "Directory that hubs' files are kept in.",
        unset="the hub's own cache directory",
    )
    use_tqdm_on_load: bool = option(
        True, checks.flag, "Say on stderr, or to the log, what is being loaded, and how far it is."
    )
    load_format: LoadFormat = option(
        "auto",
        checks.choice(get_args(LoadFormat)),
        "auto reads the weights, safetensors only from files of that kind; dummy makes them up "
        "from the seed, for measuring, and needs a directory with nothing but a config.json.",
    )
