"""A run of the command: open a file, write its quantized copy, and compare both."""

from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.models.load.bars import progress
from pagedserve.models.load.progress import say
from pagedserve.models.load.sources import ModelSource, find_local
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.native.load import OpenedModel, load_native, open_native
from pagedserve.quantize import TargetName
from pagedserve.quantize.gguf_copy import GgufCopy, check_output
from pagedserve.quantize.likelihood import compare, log_probabilities, windows
from pagedserve.quantize.targets import TARGETS

_MEGABYTE: Final = 1e6


def quantize(
    args: EngineArgs, target: TargetName, output: Path, text: str | None, num_tokens: int
) -> Iterator[str]:
    """Write a quantized copy of a GGUF file, and compare it with the file.

    Args:
        args: Options that name the model, and the dtype of its computation in the comparison.
        target: What its matrices become.
        output: The file to write.
        text: Text to compare over; None takes a sample of prose and code.
        num_tokens: Maximum tokens of the text.

    Yields:
        Lines of the report: the file when it is written, then the comparison.

    Raises:
        ConfigError: The model is no GGUF file, or has no matrix to quantize; the output exists or
            cannot be written; the text is too short.
        ModelLoadError: The model does not exist or is damaged, or is not supported.
    """
    check_output(output)
    source = _gguf_source(args.model)
    opened = open_native(args, source)
    copy = _planned(opened, target)
    tokenizer = load_tokenizer(args, model=source, header=opened.header)
    texts = windows(tokenizer, _sample() if text is None else text, num_tokens)
    if not texts:
        raise ConfigError("text: it has fewer than 2 tokens, so there is nothing to compare")
    say(f"quantizing {args.model} to {target}")
    copy.write(output)
    yield from _file_lines(copy, output, source.path)
    say(f"comparing {output} with {args.model} over {sum(map(len, texts))} tokens")
    original = load_native(args, opened)
    made = load_native(EngineArgs(str(output), quantization="gguf"))
    found = compare(
        log_probabilities(made, texts),
        log_probabilities(original, texts),
        progress(texts, "comparing"),
    )
    yield (
        f"perplexity: {found.perplexity:.4f}, of {args.model}: {found.original_perplexity:.4f}, "
        f"ratio: {found.perplexity_ratio:.4f}"
    )
    yield (
        f"KL divergence: {found.mean_kl:.5f}, same most likely token: {found.same_token:.1%}, "
        f"tokens compared: {found.num_tokens}"
    )


def _gguf_source(model: str) -> ModelSource:
    """Find the GGUF file of a model on this machine.

    Raises:
        ConfigError: It is no GGUF file.
    """
    source = find_local(model)
    if source is None or not source.is_gguf:
        what = "a hub's repository" if source is None else "a directory"
        raise ConfigError(
            f"model {model!r} is {what}, and quantize reads GGUF files: give a .gguf file, such as "
            "llama.cpp's convert_hf_to_gguf.py writes of a directory in Hugging Face format, or "
            "quantize at each load instead, with quantization 'w8a8', 'int4' or 'int8'"
        )
    return source


def _planned(opened: OpenedModel, target: TargetName) -> GgufCopy:
    assert opened.header is not None  # noqa: S101  # that of a GGUF file
    return GgufCopy.of(opened.checkpoint, opened.header, TARGETS[target])


def _sample() -> str:
    return (files("pagedserve.quantize") / "sample.txt").read_text("utf-8")


def _file_lines(copy: GgufCopy, output: Path, source: Path) -> Iterator[str]:
    """Sizes of both files, and how many matrices changed."""
    matrices = [(tensor, chosen) for tensor, chosen in copy.tensors if len(tensor.shape) > 1]
    changes = Counter(
        f"{tensor.storage} to {chosen.name}" if chosen else f"{tensor.storage} unchanged"
        for tensor, chosen in matrices
    )
    before, after = (path.stat().st_size / _MEGABYTE for path in (source, output))
    yield f"wrote {output}: {after:.1f} MB, before: {before:.1f} MB"
    yield "matrices: " + ", ".join(f"{number} {change}" for change, number in changes.items())
