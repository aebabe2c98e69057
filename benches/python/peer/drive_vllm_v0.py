"""A model-less engine around vLLM 0.6.2's scheduler, for a peer bench that imports one so named.

The peer's `bench_sched.py` times `Api.schedule` and `Model.update` and makes its prompts with
`prompt_token` and `expand_prompt`; the module it takes them from is not published with it.  Here
`update` is what vLLM's engine runs after a step for greedy requests of one sequence, in vLLM's own
code: computed tokens are counted, its `SingleStepOutputProcessor` appends a token and checks for
the end, and finished groups are freed.  Left out are detokenisation, the objects that the sampler
makes (one stands for all) and the outputs made for the caller: less than the real engine does.

vLLM's modules are found by the peer's `vllm_shim`, and only once an `Api` is made.
"""

import itertools
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

PROMPT_MODULUS = 31_991


def prompt_token(seed: int, position: int) -> int:
    """The token at a position of the endless prompt that a seed stands for."""
    return 10 + (seed * 7919 + position * 104_729 + position * position * 31) % PROMPT_MODULUS


def expand_prompt(segments: list[dict[str, Any]]) -> list[int]:
    """Token ids of a prompt given in segments: literal ones, or a seed and a length."""
    tokens: list[int] = []
    for segment in segments:
        if "token_ids" in segment:
            tokens += segment["token_ids"]
        else:
            first = segment.get("offset", 0)
            positions = range(first, first + segment["len"])
            tokens += [prompt_token(segment["seed"], position) for position in positions]
    return tokens


class Api:
    """vLLM's scheduler under a clock that stands still between the steps."""

    def __init__(self, root: str, block_order: str) -> None:
        """Import vLLM from `root`; blocks are freed in the order of objects (`identity`)."""
        if block_order != "identity":
            raise ValueError(f"block_order is {block_order!r}; only 'identity' is supported")
        self.version: str = import_module("vllm_shim").load_v0(root)
        self.now = 0.0
        self._scheduler = import_module("vllm.core.scheduler")
        clock = SimpleNamespace(time=lambda: self.now, perf_counter=time.perf_counter)
        vars(self._scheduler)["time"] = clock

    def scheduler(self, config: dict[str, Any]) -> Any:
        """A scheduler of vLLM over its first or second block manager."""
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        blocks = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching")
        return self._scheduler.Scheduler(
            SimpleNamespace(
                **{name: config[name] for name in limits},
                chunked_prefill_enabled=config.get("enable_chunked_prefill", False),
                delay_factor=0.0,
                policy="fcfs",
                preemption_mode=None,
                num_lookahead_slots=0,
                is_multi_step=False,
                send_delta_data=False,
                embedding_mode=False,
                use_v2_block_manager=config["block_manager"] == "v2",
            ),
            SimpleNamespace(**{name: config[name] for name in blocks}, sliding_window=None),
            None,
        )

    def schedule(self, scheduler: Any) -> tuple[list[Any], Any]:
        """One step: the metadata of the groups that run, and the decisions."""
        metadata, outputs, _ = scheduler.schedule()
        return metadata, outputs


class Model:
    """What stands for the model, and vLLM's processing of its outputs."""

    def __init__(self, api: Api, scheduler: Any, config: dict[str, Any]) -> None:
        del api  # the caller's signature
        self._scheduler = scheduler
        self._sequence = import_module("vllm.sequence")
        self._sampling_params = import_module("vllm.sampling_params").SamplingParams
        self._seq_ids = itertools.count()
        fake = import_module("vllm_shim")._fake  # noqa: SLF001 - the shim's own way to stub imports
        for name in ("detokenizer", "tokenizer"):
            fake(f"vllm.transformers_utils.{name}")
        processing = "vllm.engine.output_processor"
        checker = import_module(f"{processing}.stop_checker").StopChecker
        processor = import_module(f"{processing}.single_step").SingleStepOutputProcessor
        stop_checker = checker(config["max_model_len"], None)
        self._processor = processor(None, None, [scheduler], self._seq_ids, stop_checker)
        token = 7
        sample = self._sequence.SequenceOutput(0, token, {token: self._sequence.Logprob(0.0)})
        self._sampled = [self._sequence.CompletionSequenceGroupOutput([sample], None)]

    def add(self, request: dict[str, Any], block_size: int) -> None:
        """Queue a request of one sequence that generates `output_lens[0]` tokens."""
        if (request["n"], request["best_of"]) != (1, 1):
            raise ValueError("only requests of one sequence are supported")
        prompt = expand_prompt(request["prompt"])
        inputs = {"prompt": None, "prompt_token_ids": prompt}
        seq = self._sequence.Sequence(next(self._seq_ids), inputs, block_size)
        parameters = self._sampling_params(
            temperature=0.0, max_tokens=request["output_lens"][0], ignore_eos=True
        )
        group = self._sequence.SequenceGroup(
            request["id"], [seq], request["arrival_time"], sampling_params=parameters
        )
        self._scheduler.add_seq_group(group)

    def update(self, metadata: list[Any], outputs: Any) -> None:
        """End a step: every sampled sequence goes on with one token or is finished."""
        for meta, scheduled in zip(metadata, outputs.scheduled_seq_groups, strict=True):
            group = scheduled.seq_group
            group.update_num_computed_tokens(scheduled.token_chunk_size)
            self._processor.process_prompt_logprob(group, self._sampled)
            if meta.do_sample:
                self._processor.process_outputs(group, self._sampled, is_async=False)
        self._scheduler.free_finished_seq_groups()
