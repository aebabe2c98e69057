"""The command line: ``pagedserve generate``.

torch is loaded only when a model is: ``--help``, ``--version`` and refusals come at once.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from pagedserve import __version__
from pagedserve.engine.args import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError, RequestError
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedserve.engine.llm_engine import LLMEngine
    from pagedserve.inputs import Prompt
    from pagedserve.llm import LLM

_BAD_INPUT = 2
_MISSING_EXTRA = 1
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        The exit status: 0, 1 for a missing extra, 2 for bad input, 130 for Ctrl-C.
    """
    try:
        options = _parser().parse_args(argv)
        _generate(options)
    except (ConfigError, RequestError, ModelLoadError) as error:
        return _complain(error, _BAD_INPUT)
    except ImportError as error:
        return _complain(error, _MISSING_EXTRA)
    except KeyboardInterrupt:
        print("pagedserve: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all other refusals are said."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _complain(error: Exception, status: int) -> int:
    print(f"pagedserve: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pagedserve", description="A paged-attention serving engine.")
    parser.add_argument("--version", action="version", version=f"pagedserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="continue prompts with a model",
        description="Continue prompts with a model, all of them together.",
    )
    prompts = generate.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", help="a prompt; may be given again")
    prompts.add_argument("--prompts-file", type=Path, help="a file with one prompt a line")
    prompts.add_argument("--chat", action="store_true", help="put it in the model's chat template")
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, help="new tokens (%(default)s)")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)"
    )
    sampling.add_argument("--top-p", type=float, default=1.0, help="above 0, to 1 (%(default)s)")
    sampling.add_argument("--top-k", type=int, default=-1, help="-1 is all (%(default)s)")
    generate.add_argument("--json", action="store_true", help="write one JSON object a prompt")
    EngineArgs.add_cli_args(generate)
    return parser


def _generate(options: argparse.Namespace) -> None:
    args = EngineArgs.from_cli_args(options)
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
    )
    texts = _prompt_texts(options.prompt, options.prompts_file)

    from pagedserve import LLM

    llm = LLM(**dataclasses.asdict(args))
    prompts = [_chat_prompt(llm, text) for text in texts] if options.chat else texts
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    for text, output in zip(texts, outputs, strict=True):
        print(_json_line(text, output) if options.json else _readable(text, output))
    closing = _closing_line(llm.llm_engine, seconds)
    print(closing, file=sys.stderr if options.json else sys.stdout)


def _prompt_texts(prompts: list[str] | None, path: Path | None) -> list[str]:
    """The prompts of the command line or of the file.

    Raises:
        RequestError: Both or neither, or a file that cannot be read or has no prompt.
    """
    if prompts and path:
        raise RequestError("--prompt and --prompts-file are both given; give one of them")
    if path is None:
        if not prompts:
            raise RequestError("no prompts: give --prompt or --prompts-file")
        return prompts
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read --prompts-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompts-file {path} is not UTF-8 text: {error}") from error
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise RequestError(f"--prompts-file {path} has no prompt: it wants one a line")
    return [line.removesuffix("\r") for line in lines]


def _chat_prompt(llm: "LLM", text: str) -> "Prompt":
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template:
        raise RequestError("--chat: the model's tokenizer has no chat template")
    token_ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return {"prompt_token_ids": cast("list[int]", token_ids)}  # one conversation, one list


def _json_line(prompt: str, output: RequestOutput) -> str:
    completion = output.outputs[0]
    return json.dumps(
        {
            "prompt": prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
        }
    )


def _readable(prompt: str, output: RequestOutput) -> str:
    completion = output.outputs[0]
    note = f" [{completion.stop_reason}]" if completion.finish_reason == "ignored" else ""
    return f"prompt: {prompt}\ntext:   {completion.text.strip()}{note}\n"


def _closing_line(engine: "LLMEngine", seconds: float) -> str:
    stats = engine.stats
    return (
        f"prompt {stats.num_prompt_tokens / seconds:.1f} tokens/s, "
        f"generation {stats.num_generation_tokens / seconds:.1f} tokens/s, "
        f"{stats.peak_used_blocks} of {engine.memory.num_gpu_blocks} KV blocks at the peak, "
        f"{engine.scheduler.num_preemptions} preemptions"
    )
