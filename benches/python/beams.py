"""Beam search against transformers' own, and the blocks that sharing saves.

Throughput: 16 prompts by default, searched by the engine all at once and by transformers in one
left-padded batch, in turn in one process; a rate counts the tokens of the best sequence of each
prompt, as many for both: no search ends before its last token.  Once with short questions, some 40
tokens with the chat template, and once with prompts of ``--prompt-tokens``, which transformers
computes for each beam.
Only runs whose other_cores (processor time of everybody else, in cores) is near 0 say something.

Sharing: the KV blocks at the fullest moment of one request of several sequences, against as many
independent requests of the same prompt; nothing but counts, so noise does not matter.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measuring import Clock, report
from transformers import AutoModelForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.models.load.convert import converted_directory
from pagedserve.models.load.sources import resolve_model

BLOCK_SIZE = 16
SUBJECTS = (
    "how bread is baked",
    "why the sky is blue",
    "the history of the bicycle",
    "how a refrigerator works",
    "what a good teacher does",
    "the life of bees",
    "how to plan a long journey",
    "why people sleep",
    "the water cycle",
    "how a bridge is built",
    "the rules of chess",
    "what makes music sad",
    "how vaccines work",
    "the first railways",
    "why languages change",
    "how to grow tomatoes",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run; rates in tokens per second."""

    who: str
    seconds: float
    generated_tokens: int
    generated_per_second: float
    own_cores: float
    other_cores: float


def beam_params(width: int, num_tokens: int) -> SamplingParams:
    """A search of ``width`` beams to exactly ``num_tokens`` tokens."""
    return SamplingParams(
        use_beam_search=True,
        temperature=0,
        best_of=width,
        n=1,
        max_tokens=num_tokens,
        ignore_eos=True,
    )


def prompts_of(llm: LLM, num_prompts: int) -> list[list[int]]:
    """Questions in the chat template, as token ids."""
    tokenizer = llm.get_tokenizer()
    made = []
    for number in range(num_prompts):
        content = f"Write a text about {SUBJECTS[number % len(SUBJECTS)]}."
        message = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        made.append(list(tokenizer(text).input_ids))
    return made


def long_prompts_of(llm: LLM, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Prompts of so many tokens: all questions after one another, from different places on."""
    source = [token for prompt in prompts_of(llm, len(SUBJECTS)) for token in prompt]
    step = len(source) // num_prompts
    rotated = [source[start:] + source[:start] for start in range(0, step * num_prompts, step)]
    return [(tokens * (1 + num_tokens // len(tokens)))[:num_tokens] for tokens in rotated]


def timed(who: str, search: Callable[[], list[list[int]]]) -> tuple[Run, list[list[int]]]:
    """Run a search of all prompts."""
    with Clock() as clock:
        sequences = search()
    generated = sum(map(len, sequences))
    run = Run(
        who=who,
        seconds=clock.seconds,
        generated_tokens=generated,
        generated_per_second=generated / clock.seconds,
        own_cores=clock.own_cores,
        other_cores=clock.other_cores,
    )
    return run, sequences


class Peer:
    """transformers' beam search on a float32 copy of the same weights."""

    def __init__(self, model: str) -> None:
        source = resolve_model(model)
        weights = converted_directory(source.path) if source.is_gguf else source.path
        self._model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def search(self, prompts: Sequence[list[int]], width: int, num_tokens: int) -> list[list[int]]:
        """The best sequence of each prompt; all prompts are one batch."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        padded = [[0] * more + prompt for more, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * more + [1] * (longest - more) for more in padding]
        made = self._model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=width,
            eos_token_id=None,
            pad_token_id=0,
        )
        sequences: list[list[int]] = made[:, longest:].tolist()
        return sequences


def compare(llm: LLM, options: argparse.Namespace) -> None:
    """Both programs in turn on short and on long prompts."""
    peer = Peer(options.model)
    long_prompts = long_prompts_of(llm, options.num_prompts, options.prompt_tokens)
    for prompts in (prompts_of(llm, options.num_prompts), long_prompts):
        compare_on(prompts, llm, peer, options)


def compare_on(prompts: list[list[int]], llm: LLM, peer: Peer, options: argparse.Namespace) -> None:
    """Prints each run, medians and their ratio."""
    width, num_tokens = options.width, options.num_tokens

    def ours(length: int) -> list[list[int]]:
        params = beam_params(width, length)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def theirs(length: int) -> list[list[int]]:
        return peer.search(prompts, width, length)

    ours(2), theirs(2)  # warm up
    runs: dict[str, list[Run]] = {"pagedserve": [], "transformers": []}
    num_equal = 0
    for _ in range(options.repeat):
        our_run, found = timed("pagedserve", lambda: ours(num_tokens))
        their_run, expected = timed("transformers", lambda: theirs(num_tokens))
        for run in (our_run, their_run):
            runs[run.who].append(run)
            report("run", asdict(run), as_json=options.json)
        num_equal = sum(
            answer == reference for answer, reference in zip(found, expected, strict=True)
        )
    rates = {
        who: statistics.median(run.generated_per_second for run in made)
        for who, made in runs.items()
    }
    about = {
        "width": width,
        "num_prompts": len(prompts),
        "prompt_tokens": max(map(len, prompts)),
        "num_tokens": num_tokens,
    }
    ratio = rates["pagedserve"] / rates["transformers"]
    figures = {**about, **rates, "ratio": ratio, "equal_sequences": num_equal}
    report("median", figures, as_json=options.json)


def peak_blocks(
    llm: LLM, prompt: list[int], params: SamplingParams, *, num_requests: int = 1
) -> int:
    """Blocks in use at the fullest moment of so many requests of one prompt."""
    stats = llm.llm_engine.stats
    stats.peak_used_blocks = 0
    llm.generate(prompt_token_ids=[prompt] * num_requests, sampling_params=params, use_tqdm=False)
    return stats.peak_used_blocks


def share(llm: LLM, options: argparse.Namespace) -> None:
    """Blocks with and without sharing, for samples and for beams."""
    tokens = options.num_tokens
    (prompt,) = long_prompts_of(llm, 1, options.prompt_tokens)
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    samples = SamplingParams(n=4, seed=0, max_tokens=tokens, ignore_eos=True)
    for what, params in (
        ("n = 4", samples),
        ("beam width 4", beam_params(4, tokens)),
        ("beam width 6", beam_params(6, tokens)),
    ):
        shared = peak_blocks(llm, prompt, params)
        alone = peak_blocks(llm, prompt, greedy, num_requests=params.max_num_running_seqs)
        figures = {
            "what": what,
            "prompt_tokens": len(prompt),
            "num_tokens": tokens,
            "blocks": shared,
            "blocks_of_independent": alone,
            "saved": 1 - shared / alone,
        }
        report("sharing", figures, as_json=options.json)


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--width", type=int, default=4, help="beams")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=64, help="new tokens of each")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="of long prompts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--sharing-only", action="store_true", help="count blocks, time nothing")
    parser.add_argument("--json", action="store_true", help="one object a line")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, count and print."""
    options = options_from(arguments)
    torch.set_num_threads(options.threads)
    llm = LLM(model=options.model, dtype="float32", block_size=BLOCK_SIZE)
    share(llm, options)
    if not options.sharing_only:
        compare(llm, options)


if __name__ == "__main__":
    main()
