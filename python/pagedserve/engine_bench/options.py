"""The options of ``bench latency``, ``throughput`` and ``startup``, by vLLM's names.

Parsing them imports neither numpy nor torch, so that the command line starts quickly.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pagedserve.bench.arguments import COUNT, COUNT_OR_ZERO, ParsedOptions, adder, switch
from pagedserve.checks import Check, choice, optional, real
from pagedserve.errors import ConfigError

_DATASETS = ("random", "sharegpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(ParsedOptions):
    """Options of all three commands.

    Attributes:
        output_json: File that the results are written to; None writes none.
    """

    output_json: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyOptions(RunOptions):
    """The options of ``bench latency``."""

    checks: ClassVar[Mapping[str, Check[Any]]] = {
        "input_len": COUNT,
        "output_len": COUNT,
        "batch_size": COUNT,
        "n": COUNT,
        "num_iters_warmup": COUNT_OR_ZERO,
        "num_iters": COUNT,
    }

    input_len: int
    output_len: int
    batch_size: int
    n: int
    use_beam_search: bool
    num_iters_warmup: int
    num_iters: int
    disable_detokenize: bool

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Add these options to a command line."""
        group = parser.add_argument_group("benchmark")
        add = adder(group)
        add("input-len", "tokens per prompt", type=int, default=32)
        add("output-len", "tokens per output", type=int, default=128)
        add("batch-size", "prompts per batch", type=int, default=8)
        _add_n(group)
        switch(group, "use-beam-search", "search with n beams instead of sampling")
        add("num-iters-warmup", "batches before those measured", type=int, default=10)
        add("num-iters", "batches that are measured", type=int, default=30)
        _add_common(group)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputOptions(RunOptions):
    """The options of ``bench throughput``; ``input_len`` and others may be None: see ``add_to``."""

    checks: ClassVar[Mapping[str, Check[Any]]] = {
        "dataset_name": optional(choice(_DATASETS)),
        "input_len": optional(COUNT),
        "output_len": optional(COUNT),
        "prefix_len": optional(COUNT_OR_ZERO),
        "random_range_ratio": optional(real("from 0 to 1", low=0, high=1)),
        "n": COUNT,
        "num_prompts": COUNT,
        "num_warmups": COUNT_OR_ZERO,
    }

    dataset_name: str | None
    dataset_path: Path | None
    input_len: int | None
    output_len: int | None
    prefix_len: int | None
    random_range_ratio: float | None
    n: int
    num_prompts: int
    num_warmups: int
    disable_detokenize: bool

    def __post_init__(self) -> None:
        """Check the options; see ``ParsedOptions``."""
        ParsedOptions.__post_init__(self)
        if self.dataset_name == "sharegpt":
            self.dataset_file()
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise ConfigError("--dataset-name random takes no --dataset-path; sharegpt does")
        if self.is_random:
            return
        for name in ("input_len", "prefix_len", "random_range_ratio"):
            if getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is for --dataset-name random; sharegpt has prompts")

    @property
    def is_random(self) -> bool:
        """Whether prompts are random: by default if no file is given."""
        return (self.dataset_name or ("sharegpt" if self.dataset_path else "random")) == "random"

    def dataset_file(self) -> Path:
        """The file of conversations.

        Raises:
            ConfigError: None was given.
        """
        if self.dataset_path is None:
            raise ConfigError("--dataset-name sharegpt needs --dataset-path")
        return self.dataset_path

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Add these options to a command line."""
        group = parser.add_argument_group("benchmark")
        add = adder(group)
        add(
            "dataset-name",
            f"source of prompts: {', '.join(_DATASETS)} (sharegpt if a path is given)",
        )
        add("dataset-path", "file of the conversations of sharegpt, .json or .jsonl", type=Path)
        _add_alias(group, "input-len", "tokens per random prompt (1024)", type=int)
        _add_alias(
            group, "output-len", "tokens per output (128; those of a conversation)", type=int
        )
        _add_alias(group, "prefix-len", "tokens that all random prompts share (0)", type=int)
        add(
            "random-range-ratio",
            "fraction by which both random lengths vary, up and down (0)",
            type=float,
        )
        _add_n(group)
        add("num-prompts", "number of requests", type=int, default=1000)
        add("num-warmups", "number of earlier requests that are not measured", type=int, default=0)
        _add_common(group)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupOptions(RunOptions):
    """The options of ``bench startup``."""

    checks: ClassVar[Mapping[str, Check[Any]]] = {
        "num_iters_cold": COUNT,
        "num_iters_warmup": COUNT_OR_ZERO,
        "num_iters_warm": COUNT,
    }

    num_iters_cold: int
    num_iters_warmup: int
    num_iters_warm: int

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Add these options to a command line."""
        group = parser.add_argument_group("benchmark")
        add = adder(group)
        add("num-iters-cold", "starts with empty caches", type=int, default=3)
        add("num-iters-warmup", "starts that fill the caches, not measured", type=int, default=1)
        add("num-iters-warm", "starts with full caches", type=int, default=3)
        _add_output(group)


def _add_n(group: argparse._ArgumentGroup) -> None:
    adder(group)("n", "outputs per prompt", type=int, default=1)


def _add_alias(group: argparse._ArgumentGroup, name: str, text: str, **given: Any) -> None:
    """Add an option that may also be given as ``--random-`` and its name."""
    dest = name.replace("-", "_")
    group.add_argument(f"--{name}", f"--random-{name}", dest=dest, help=text, **given)


def _add_common(group: argparse._ArgumentGroup) -> None:
    switch(group, "disable-detokenize", "generate token ids only, without their text")
    _add_output(group)


def _add_output(group: argparse._ArgumentGroup) -> None:
    adder(group)("output-json", "file to write the results to, as JSON", type=Path)
