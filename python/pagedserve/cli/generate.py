"""``pagedserve generate``: continue prompts with a model in this process."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedserve.cli.early import check_early
from pagedserve.cli.sampling import add_generation, sampling_params
from pagedserve.collector import collector_paused
from pagedserve.config import EngineArgs
from pagedserve.config.sampling import DEFAULT_PARAMS
from pagedserve.engine.ahead import load_ahead
from pagedserve.engine.stats import hit_rate
from pagedserve.errors import ConfigError, RequestError, extra_needed
from pagedserve.native.choice import choose_backend
from pagedserve.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from pagedserve.engine.llm_engine import LLMEngine


def add_generate_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add ``generate`` to a command line."""
    generate = commands.add_parser(
        "generate",
        usage="pagedserve generate --model MODEL [options]",
        help="continue prompts with a model",
        description="Continue prompts with a model, all in one batch.",
    )
    prompts = generate.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", help="prompt; may be repeated")
    prompts.add_argument("--prompts-file", type=Path, help="file with one prompt per line")
    prompts.add_argument("--chat", action="store_true", help="apply the model's chat template")
    add_generation(generate.add_argument_group("sampling"))
    generate.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    EngineArgs.add_cli_args(generate, without=DEFAULT_PARAMS)
    generate.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    if options.model is None:
        raise ConfigError("no model: give --model")
    args = EngineArgs.from_cli_args(options)
    params = sampling_params(options)
    texts = _prompt_texts(options.prompt, options.prompts_file)
    extra = choose_backend(args).extra
    check_early(args, "pagedserve generate", extra)
    with extra_needed("pagedserve generate", extra):
        from pagedserve.models.load.progress import loading

    with loading(args.model, is_shown=args.use_tqdm_on_load), collector_paused():
        with extra_needed("pagedserve generate", extra):
            load_ahead(args)
        from pagedserve import LLM  # importing torch alone takes seconds

        llm = LLM(**args.llm_options)
    started = time.perf_counter()
    if options.chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    else:
        outputs = llm.generate(texts, params)
    seconds = time.perf_counter() - started
    for text, output in zip(texts, outputs, strict=True):
        print(_json_line(text, output) if options.json else _readable(text, output))
    closing = _closing_line(llm.llm_engine, outputs, seconds)
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
        raise RequestError(f"--prompts-file {path} has no prompt: it must have one per line")
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
    """A line per token: its log-probability and text, then the most likely ones of its position."""
    for token_id, entry in zip(completion.token_ids, completion.logprobs or (), strict=True):
        chosen = entry[token_id]
        ranked = sorted(entry.values(), key=attrgetter("rank"))
        others = "  ".join(f"{token.logprob:.3f} {token.decoded_token!r}" for token in ranked)
        yield f"  {chosen.logprob:8.3f}  {chosen.decoded_token!r:<16} | {others}"


def _closing_line(engine: "LLMEngine", outputs: Sequence[RequestOutput], seconds: float) -> str:
    """The speed of a run: of prompts until the last first token, of generation overall."""
    stats, scheduler = engine.stats, engine.scheduler
    first_tokens = [output.metrics.time_to_first_token for output in outputs]
    prefill_seconds = max((time for time in first_tokens if time is not None), default=seconds)
    return (
        f"prompt {stats.num_prompt_tokens / prefill_seconds:.1f} tokens/s, "
        f"generation {stats.num_generation_tokens / seconds:.1f} tokens/s, "
        f"{stats.peak_used_blocks} of {engine.memory.num_gpu_blocks} KV blocks at the peak, "
        f"{scheduler.num_preemptions} preemptions{hit_rate(scheduler)}"
    )
