"""vLLM's modules that exist here under other names, in one table, for scripts that import them.

``pagedserve`` finds them by ``find_spec`` where no file has the name.  Type checkers do not.
"""

import importlib.util
import sys
from enum import Enum
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from itertools import accumulate
from types import ModuleType
from typing import Any, Final, TypeAlias
from uuid import uuid4

from pagedserve.errors import extra_needed
from pagedserve.tokenizer import Tokenizer
from pagedserve.vllm_names import ABSENT_OPTIONS, ALIASES, HINTS

# Number of values that ``print_embeddings`` prints.
_SHOWN: Final = 4

_DISTRIBUTED: Final = [
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
]
_LOGPROBS: Final = ["Logprob", "PromptLogprobs", "SampleLogprobs"]
_PROMPTS: Final = ["ExplicitEncoderDecoderPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
# Names of each module, without "pagedserve.".
MODULES: Final = {
    "beam_search": ["BeamSearchOutput", "BeamSearchSequence"],
    "distributed": _DISTRIBUTED,
    "distributed.parallel_state": _DISTRIBUTED,
    "engine.async_llm_engine": ["AsyncLLMEngine"],
    "engine.protocol": ["EngineClient"],
    "entrypoints.chat_utils": ["resolve_hf_chat_template"],
    "entrypoints.llm": ["LLM"],
    "inputs.data": _PROMPTS,
    "inputs.llm": _PROMPTS,
    "logger": ["init_logger"],
    "logprobs": _LOGPROBS,
    "renderers.hf": ["resolve_chat_template"],
    "sequence": [*_LOGPROBS, "RequestMetrics"],
    "tokenizers": ["get_tokenizer"],
    "transformers_utils.tokenizer": ["AnyTokenizer", "MistralTokenizer", "get_tokenizer"],
    "usage.usage_lib": ["UsageContext"],
    "utils.argparse_utils": ["FlexibleArgumentParser"],
    "utils.print_utils": ["print_embeddings"],
    "v1.engine.async_llm": ["AsyncEngineArgs", "AsyncLLM"],
    "v1.engine.exceptions": ["EngineDeadError"],
    "v1.engine.llm_engine": ["LLMEngine"],
    "v1.metrics.reader": ["Counter", "Gauge", "Histogram", "Metric", "Vector"],
    "v1.sample.logits_processor": ["AdapterLogitsProcessor", "RequestLogitsProcessor"],
    "version": ["__version__"],
}
# Modules of the table and their parent packages.
_FOUND: Final = {
    name for module in MODULES for name in accumulate(module.split("."), "{}.{}".format)
}

# Module and name of each object that is not at the top level under its name.
_HOMES: Final = {
    "AnyTokenizer": "pagedserve.tokenizer:Tokenizer",
    "AsyncLLM": "pagedserve:AsyncLLMEngine",
    "FlexibleArgumentParser": "pagedserve.config.argument_parser:FlexibleArgumentParser",
    "init_logger": "logging:getLogger",
    **{
        name: f"pagedserve.engine.processors:{name}"
        for name in MODULES["v1.sample.logits_processor"]
    },
    **{name: f"pagedserve.metrics:{name}" for name in MODULES["v1.metrics.reader"]},
    "resolve_hf_chat_template": f"{__name__}:resolve_chat_template",
    **{
        name: f"{__name__}:{name}"
        for name in (
            *("MistralTokenizer", "PromptLogprobs", "SampleLogprobs", "UsageContext"),
            *("get_tokenizer", "print_embeddings", "resolve_chat_template"),
        )
    },
    **dict.fromkeys(_DISTRIBUTED, f"{__name__}:do_nothing"),
}


class _OtherName(Loader):
    """Gives a module a second name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        """Put the module itself in the place of the new one."""
        sys.modules[module.__name__] = import_module(self._name)


class _Loader(Loader):
    """Creates a module of the table."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the names of the module."""
        names = MODULES.get(_own_name(module.__name__), [])
        vars(module).update({name: _object(name) for name in names}, __all__=names)


def find_other_name(name: str, own_name: str) -> ModuleSpec | None:
    """Find a module of this package by another name.

    Args:
        name: Its other name.
        own_name: Its name here.
    """
    if importlib.util.find_spec(own_name) is None:
        return None
    return spec_from_loader(name, _OtherName(own_name), origin=own_name)


def find_spec(name: str) -> ModuleSpec | None:
    """Find a module of the table or a package around it, by its full name."""
    own = _own_name(name)
    if own not in _FOUND:
        return None
    is_package = any(found.startswith(f"{own}.") for found in _FOUND)
    return spec_from_loader(name, _Loader(), origin=__name__, is_package=is_package)


def _own_name(name: str) -> str:
    return name.removeprefix("pagedserve.")


def _object(name: str) -> object:
    module, _, attribute = _HOMES.get(name, f"pagedserve:{name}").partition(":")
    found: object = getattr(import_module(module), attribute)
    return found


class UsageContext(Enum):
    """Argument of ``from_engine_args`` without effect: no usage is reported."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


# Types of annotations: a dictionary of ``Logprob`` by token id for each token.
SampleLogprobs: TypeAlias = list[dict[int, Any]]
PromptLogprobs: TypeAlias = list[dict[int, Any] | None]


class MistralTokenizer:
    """Class of none of the tokenizers here, for ``isinstance``."""


def do_nothing(*_args: object, **_named: object) -> None:
    """Do nothing: ``LLM.shutdown`` frees the memory and stops the ranks."""


def get_tokenizer(
    tokenizer_name: object, *, revision: str | None = None, **options: Any
) -> Tokenizer:
    """Load a tokenizer as ``LLM.get_tokenizer`` returns it.

    Args:
        tokenizer_name: Directory, hub id or model that has it.
        revision: State of a hub's repository; None is the newest.
        **options: Further options of ``EngineArgs``, such as ``download_dir``; others are those of
            transformers' tokenizer, such as ``padding_side``, and transformers loads it.

    Raises:
        ConfigError: An invalid option.
        ModelLoadError: The tokenizer does not exist or cannot be loaded.
        ImportError: transformers is needed and is not installed.
    """
    from pagedserve.config import EngineArgs
    from pagedserve.models.tokenizer.loader import tokenizer_for_callers

    known = {*EngineArgs.__dataclass_fields__, *ALIASES, *ABSENT_OPTIONS, *HINTS}
    further = {name: options.pop(name) for name in options.keys() - known}
    # No file of the model is read.
    args = EngineArgs(
        "smollm2", tokenizer=str(tokenizer_name), tokenizer_revision=revision, **options
    )
    if further:
        with extra_needed("a tokenizer of transformers", "engine"):
            from pagedserve.models.tokenizer.transformers_tokenizer import (
                load_transformers_tokenizer,
            )
        return load_transformers_tokenizer(args, **further)
    return tokenizer_for_callers(args)


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: Any = None, **_model: object
) -> str | None:
    """Return the chat template of a tokenizer, or the one that is given; None without one."""
    if chat_template is None and tokenizer.chat_template is not None:
        chat_template = tokenizer.get_chat_template(tools=tools)
    return chat_template


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of an embedding and its length."""
    shown = [*map(str, embeds[:_SHOWN]), *(["..."] if len(embeds) > _SHOWN else [])]
    print(f"{prefix}: [{', '.join(shown)}] (size={len(embeds)})")  # noqa: T201  # what it is for


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid4().hex
