"""``LLM``: prompts in, outputs out, in one call."""

import sys
from collections.abc import Sequence
from typing import Any, Final, SupportsIndex

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from pagedserve.config import AttentionBackend, CpuTier, LoadFormat, ModelDtype, Quantization
from pagedserve.engine.admission import CheckedRequest
from pagedserve.engine.args import EngineArgs, PreemptionMode
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.inputs import Prompt, match_params, parse_prompts
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

# Seconds between two looks at the engine's statistics.
_STATS_INTERVAL: Final = 2.0


class LLM:
    """A model that continues many prompts at once.

    Attributes:
        llm_engine: The engine; to drive it step by step, use no ``generate`` meanwhile.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: ModelDtype = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        num_gpu_blocks: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        seed: int = 0,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float | None = None,
        enable_prefix_caching: bool = False,
        enable_chunked_prefill: bool = False,
        swap_space: float | None = None,
        preemption_mode: PreemptionMode | None = None,
        num_lookahead_slots: int = 0,
        attention_backend: AttentionBackend | None = None,
        cpu_tier: CpuTier | None = None,
        quantization: Quantization | None = None,
        load_format: LoadFormat = "auto",
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        cpu_instructions: str | None = None,
    ) -> None:
        """Load a model and make its KV cache; says on stderr what was chosen.

        Args:
            model: "smollm2", a local directory in Hugging Face format, a .gguf file or a hub id.
            dtype: Of weights and KV cache; "auto" is float32 on the CPU, else the model's own.
            max_model_len: Tokens of a sequence, prompt and output; None is what the model allows.
            device: "auto" (the first GPU if there is one, else the CPU), "cpu", "cuda", "cuda:N".
            num_gpu_blocks: KV blocks; None takes what ``kv_cache_memory`` holds.
            block_size: Tokens of a KV block.
            max_num_seqs: Sequences of a step.
            max_num_batched_tokens: Tokens of a step; None is 2048, or ``max_model_len`` if more;
                512 with chunked prefill.
            seed: For the random numbers of requests that have no seed of their own.
            kv_cache_memory: Bytes of the KV cache; None is 1 GiB on the CPU, less where less is
                free, and on a GPU what ``gpu_memory_utilization`` leaves.
            gpu_memory_utilization: Share of the GPU's whole memory to take, weights included;
                None is 0.9.
            enable_prefix_caching: Keep the KV blocks of what was computed, for later prompts that
                begin with the same tokens.
            enable_chunked_prefill: Compute long prompts in parts, beside the tokens of others.
            swap_space: GiB of host memory for the KV blocks of preempted requests; None is as
                much as the KV cache holds, at most 4.
            preemption_mode: "recompute", "swap" or None: by the number of a request's sequences.
            num_lookahead_slots: KV slots kept free behind each running sequence.
            attention_backend: "rust" (on the CPU), "triton" (on NVIDIA GPUs) or "torch"; None
                takes rust or triton where it can.
            cpu_tier: "fused", "modules" or "generic": how much of the model's own code is
                exchanged for Rust kernels on the CPU; None is as much as can be.
            quantization: "int8" makes the weights of linear layers bytes, on the CPU; None leaves
                them as they are.
            load_format: "auto" reads the weights; "dummy" makes them up, for measuring.
            enforce_eager: Capture no CUDA graphs.
            async_scheduling: Launch a step before the tokens of the last are known; None does so
                on a GPU.
            cpu_instructions: "portable", "avx2", "avx512" or "avx512_bf16", for all Rust kernels
                of the process; None is the best of this CPU.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the memory.
            ModelLoadError: The model cannot be found, read or run.
        """
        args = EngineArgs(
            model=model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            swap_space=swap_space,
            preemption_mode=preemption_mode,
            num_lookahead_slots=num_lookahead_slots,
            attention_backend=attention_backend,
            cpu_tier=cpu_tier,
            quantization=quantization,
            load_format=load_format,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            cpu_instructions=cpu_instructions,
        )
        self.llm_engine = LLMEngine(args)
        self._num_calls = 0
        for line in (self.llm_engine.memory.describe(), self.llm_engine.describe_backends()):
            print(line, file=sys.stderr)  # noqa: T201  # for the user

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.llm_engine.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as if nothing had been computed yet.

        Returns:
            Whether it was done; between two ``generate`` calls it always is.
        """
        return self.llm_engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[SupportsIndex] | Sequence[Sequence[SupportsIndex]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, all of them together.

        All requests are checked before the first is taken up.  After any exception, an interrupt
        included, none of them is left in the engine, which stays usable.

        Args:
            prompts: One prompt or several: strings or ``{"prompt_token_ids": [...]}``.
            sampling_params: One for all or one a prompt; None is ``SamplingParams()``.
            prompt_token_ids: Instead of ``prompts``: token ids of one prompt or of several.
            use_tqdm: Show a progress bar on stderr, every few seconds with the engine's
                statistics.

        Returns:
            The finished outputs in the order of the prompts.

        Raises:
            RequestError: A prompt or parameter that cannot be accepted; it says which and why.
        """
        parsed = parse_prompts(prompts, prompt_token_ids)
        params = match_params(sampling_params, len(parsed))
        engine = self.llm_engine
        single = len(parsed) == 1
        checked = [
            engine.check_request(one, own, name="the prompt" if single else f"prompt {index}")
            for index, (one, own) in enumerate(zip(parsed, params, strict=True))
        ]
        request_ids = [f"generate-{self._num_calls}-{index}" for index in range(len(checked))]
        self._num_calls += 1
        try:
            return self._run(dict(zip(request_ids, checked, strict=True)), use_tqdm=use_tqdm)
        except BaseException:
            engine.abort_request(request_ids)
            raise

    def _run(self, requests: dict[str, CheckedRequest], *, use_tqdm: bool) -> list[RequestOutput]:
        for request_id, checked in requests.items():
            self.llm_engine.add_request(request_id, checked, final_only=True)
        finished: dict[str, RequestOutput] = {}
        with _progress(len(requests), use_tqdm=use_tqdm) as progress:
            while len(finished) < len(requests):
                outputs = [one for one in self.llm_engine.step() if one.request_id in requests]
                if outputs:
                    finished |= {one.request_id: one for one in outputs}
                    progress.update(len(outputs))
                if use_tqdm and self.llm_engine.seconds_since_stats > _STATS_INTERVAL:
                    progress.set_postfix_str(self.llm_engine.stats_line())
        return [finished[request_id] for request_id in requests]


def _progress(num_requests: int, *, use_tqdm: bool) -> Any:  # tqdm has no types
    return tqdm(total=num_requests, desc="prompts", dynamic_ncols=True, disable=not use_tqdm)
