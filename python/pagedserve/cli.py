"""The command line: ``pagedserve generate``, ``serve`` and ``bench serve``.

torch is loaded only when a model is: ``--help``, ``--version`` and refusals come at once.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pagedserve import __version__
from pagedserve.bench.command import add_bench_parser
from pagedserve.config import EngineArgs
from pagedserve.engine.stats import hit_rate
from pagedserve.errors import ConfigError, ModelLoadError, RequestError, extra_needed
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_checks import UNDRAWN
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.options import ServerArgs

if TYPE_CHECKING:
    from pagedserve.engine.llm_engine import LLMEngine

_BAD_INPUT = 2
_MISSING_EXTRA = 1
_INTERRUPTED = 130
_PIPE_CLOSED = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        The exit status: 0, 1 for a missing extra, 2 for bad input, 130 for Ctrl-C, 141 where the
        reader of a pipe has gone.
    """
    try:
        options = _parser().parse_args(argv)
        status: int = options.run(options)
        sys.stdout.flush()
    except (ConfigError, RequestError, ModelLoadError) as error:
        return _complain(error, _BAD_INPUT)
    except ImportError as error:
        return _complain(error, _MISSING_EXTRA)
    except KeyboardInterrupt:
        print("pagedserve: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Who reads has enough, like head; what is left would be written, and fail, at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return status


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
    _add_sampling(generate.add_argument_group("sampling"))
    generate.add_argument("--json", action="store_true", help="write one JSON object a prompt")
    EngineArgs.add_cli_args(generate)
    generate.set_defaults(run=_generate)
    _add_serve(commands)
    add_bench_parser(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's clients speak it",
        description="Serve a model over HTTP, as OpenAI's clients speak it.",
        conflict_handler="resolve",  # of vLLM's names some mean something to a server
    )
    serve.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    EngineArgs.add_cli_args(serve)
    ServerArgs.add_cli_args(serve)
    serve.set_defaults(
        run=_serve,
        # An answer with all log-probabilities of a long text would hold up everybody.
        max_logprobs=20,
        # As vLLM's server: a long prompt holds up nobody, a conversation's next turn is short.
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
    )


def _make_directory(name: str, path: str) -> None:
    """Make a directory that an option names, so that files can be written there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name} is {path}; it must be a directory: {error.strerror}") from error


def _serve(options: argparse.Namespace) -> int:
    options.model = options.model or options.model_tag
    if options.model is None:
        raise ConfigError("no model: give it, as in pagedserve serve smollm2")
    server_args = ServerArgs.from_cli_args(options)
    for argument in dataclasses.fields(server_args):  # an engine may know it as not there
        delattr(options, argument.name)
    engine_args = EngineArgs.from_cli_args(options)
    if engine_args.decision_log is not None:
        _make_directory("decision_log", engine_args.decision_log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")

    with extra_needed("pagedserve serve", "engine,serve"):
        from pagedserve.server.run import serve

    return serve(engine_args, server_args)


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    def add(name: str, kind: type, text: str, default: object = None) -> None:
        shown = text if default is None else f"{text} (%(default)s)"
        group.add_argument(f"--{name}", type=kind, default=default, help=shown)

    add("max-tokens", int, "new tokens", 128)
    add("temperature", float, "0 is greedy (0; 1 with top-p, top-k, min-p or several outputs)")
    add("top-p", float, "above 0, to 1", 1.0)
    add("top-k", int, "-1 is all", -1)
    add("min-p", float, "0 to 1", 0.0)
    add("n", int, "outputs a prompt", 1)
    add("best-of", int, "sampled sequences, of which the likeliest --n are kept (--n)")
    add("beam-width", int, "search with so many beams, of which the best --n are kept")
    add("length-penalty", float, "a beam's score is its log-probability / length ** this", 1.0)
    add("presence-penalty", float, "-2 to 2", 0.0)
    add("frequency-penalty", float, "-2 to 2", 0.0)
    add("repetition-penalty", float, "above 1 against repetition, below 1 for it", 1.0)
    add("logprobs", int, "show so many likeliest tokens of each position")
    group.add_argument("--stop", action="append", help="a text that ends it; may be given again")


def _sampling_params(options: argparse.Namespace) -> SamplingParams:
    """What the options say.

    Raises:
        RequestError: Options that contradict each other, or a value out of range.
    """
    same_names = (
        "top_p top_k min_p n max_tokens length_penalty presence_penalty frequency_penalty "
        "repetition_penalty logprobs stop"
    )
    for reason in _contradictions(options):
        raise RequestError(reason)
    given = {name: getattr(options, name) for name in same_names.split()}
    has_beams = options.beam_width is not None
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if _asks_to_draw(options) and not has_beams else 0.0
    return SamplingParams(
        **given,
        best_of=options.beam_width if has_beams else options.best_of,
        use_beam_search=has_beams,
        temperature=temperature,
    )


def _asks_to_draw(options: argparse.Namespace) -> bool:
    has_several = max(options.n, options.best_of or 1) > 1
    return has_several or any(_is_drawn(options, name) for name in ("top_p", "top_k", "min_p"))


def _is_drawn(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name) not in (None, *UNDRAWN[name])


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    """What is wrong between options, in their own names."""
    width, n = options.beam_width, options.n
    if width is None:
        if max(n, options.best_of or 1) > 1 and (options.temperature == 0 or options.top_k == 1):
            yield (
                "several outputs are wanted, and with --temperature 0 or --top-k 1 they would all "
                "be equal: give others, or --beam-width"
            )
        if options.length_penalty != 1:
            yield "--length-penalty is given without --beam-width; it is for beams alone"
        return
    if options.best_of is not None:
        yield "--beam-width and --best-of are both given; give one of them"
    if width < max(2, n):
        yield f"--beam-width is {width}; it must be at least 2 and at least --n, {n}"
    for name in UNDRAWN:
        if _is_drawn(options, name):
            option = f"--{name.replace('_', '-')}"
            yield f"{option} and --beam-width are both given, and a search draws nothing: give one"


def _generate(options: argparse.Namespace) -> int:
    if options.model is None:
        raise ConfigError("no model: give --model")
    args = EngineArgs.from_cli_args(options)
    params = _sampling_params(options)
    texts = _prompt_texts(options.prompt, options.prompts_file)

    from pagedserve import LLM

    llm = LLM(**dataclasses.asdict(args))
    started = time.perf_counter()
    if options.chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    else:
        outputs = llm.generate(texts, params)
    seconds = time.perf_counter() - started
    for text, output in zip(texts, outputs, strict=True):
        print(_json_line(text, output) if options.json else _readable(text, output))
    closing = _closing_line(llm.llm_engine, seconds)
    print(closing, file=sys.stderr if options.json else sys.stdout)
    return 0


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


def _json_line(prompt: str, output: RequestOutput) -> str:
    return json.dumps(
        {"prompt": prompt, "outputs": [_json_output(completion) for completion in output.outputs]}
    )


def _json_output(completion: CompletionOutput) -> dict[str, object]:
    shown: dict[str, object] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.cumulative_logprob is not None:
        shown["cumulative_logprob"] = completion.cumulative_logprob
    if completion.logprobs is not None:
        shown["logprobs"] = [
            {str(token): dataclasses.asdict(logprob) for token, logprob in entry.items()}
            for entry in completion.logprobs
        ]
    return shown


def _readable(prompt: str, output: RequestOutput) -> str:
    lines = [f"prompt: {prompt}"]
    for completion in output.outputs:
        label = "text: " if len(output.outputs) == 1 else f"text {completion.index + 1}:"
        lines.append(f"{label:<8}{completion.text.strip()}")
        if completion.finish_reason in ("ignored", "error"):
            lines.append(f"ended:  {completion.stop_reason}")
        if completion.logprobs is not None:
            lines += _readable_logprobs(completion)
    return "\n".join(lines) + "\n"


def _readable_logprobs(completion: CompletionOutput) -> Iterator[str]:
    """A line a token: its log-probability and text, then the likeliest of its position."""
    for token_id, entry in zip(completion.token_ids, completion.logprobs or (), strict=True):
        chosen = entry[token_id]
        others = "  ".join(
            f"{token.logprob:.3f} {token.decoded_token!r}" for token in entry.values()
        )
        yield f"  {chosen.logprob:8.3f}  {chosen.decoded_token!r:<16} | {others}"


def _closing_line(engine: "LLMEngine", seconds: float) -> str:
    stats, scheduler = engine.stats, engine.scheduler
    return (
        f"prompt {stats.num_prompt_tokens / seconds:.1f} tokens/s, "
        f"generation {stats.num_generation_tokens / seconds:.1f} tokens/s, "
        f"{stats.peak_used_blocks} of {engine.memory.num_gpu_blocks} KV blocks at the peak, "
        f"{scheduler.num_preemptions} preemptions{hit_rate(scheduler)}"
    )
