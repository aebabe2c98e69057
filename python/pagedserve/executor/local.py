"""Executor in one process: one device with its model and KV pools."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve._core import KVGroup, SchedulerConfig, SchedulerOutputs
from pagedserve.attention.cross import CrossStep
from pagedserve.cache.engine import (
    CacheEngine,
    group_window,
    kv_bytes_per_block,
    split_layers,
)
from pagedserve.cache.states import state_bytes_per_slot
from pagedserve.config import EngineArgs
from pagedserve.device import cuda_of
from pagedserve.errors import ConfigError, StepError
from pagedserve.executor.launched import LaunchedRun, StepWork
from pagedserve.executor.memory import (
    DEFAULT_KV_CACHE_BYTES,
    MemoryPlan,
    WindowNeed,
    free_host_bytes,
    plan_memory,
)
from pagedserve.executor.profile import available_memory
from pagedserve.executor.protocol import (
    CacheShape,
    ModelInfo,
    StepHandle,
    StepLimits,
)
from pagedserve.images import ImageRules
from pagedserve.lora.apply import AdapterModules
from pagedserve.lora.host import HostAdapter, HostAdapters
from pagedserve.models.encoder_prompts import EncoderInput
from pagedserve.models.flat_batch import StepImages
from pagedserve.models.image_features import image_positions
from pagedserve.models.loader import LoadedModel, load_model
from pagedserve.models.prompt_images import PlacedImage, PromptImages
from pagedserve.parallel.group import RankGroup
from pagedserve.pooling.pooler import pool_rows, token_types
from pagedserve.pooling.rules import PoolingRules
from pagedserve.runner.buffers import StepBuffers, StepMemory
from pagedserve.runner.encoder import PromptEncoder
from pagedserve.runner.graphs import DecodeGraphs
from pagedserve.runner.images import ImageTower
from pagedserve.runner.model_runner import Forward, ModelRunner
from pagedserve.runner.padded import ladder
from pagedserve.sampling.rows import PromptTargets, RowSampling
from pagedserve.sampling.sampler import Sampler

# Attributes that hold weights and pools.
_MEMORY: Final = (
    *("loaded", "_adapters", "_tower", "_encoder", "_cache", "_runner"),
    *("_group", "_channel"),
)


class LocalExecutor:
    """Loads a model into this process and runs steps on it; an ``Executor``."""

    def __init__(self, args: EngineArgs, group: RankGroup | None = None) -> None:
        """Load the model; see `pagedserve.models.loader.load_model` for the errors.

        Args:
            args: Options of the engine.
            group: Group of the ranks that share the model; None for a single process.
        """
        self._args = args
        self._group = group
        self.loaded = load_model(args, group=group)
        _check_options(args, self.loaded)
        self._cuda = cuda_of(self.loaded.device)
        is_recordable = self._cuda is not None and self.loaded.attention_backend.can_record_graphs
        # How rows with states are batched depends on the step; pooling models only prefill.
        is_decoding = not self.loaded.states and self.loaded.pooling is None
        self._captures_graphs = is_recordable and is_decoding and not args.enforce_eager
        self._adapters: AdapterModules | None = None
        if args.enable_lora:
            self._adapters = AdapterModules(
                self.loaded, num_slots=args.max_loras, max_rank=args.max_lora_rank
            )
        self._host_adapters = HostAdapters(
            {} if self._adapters is None else self._adapters.targets,
            max_rank=args.max_lora_rank,
            max_cpu_loras=args.max_cpu_loras or args.max_loras,
        )
        self._tower = ImageTower(self.loaded.model, int(args.mm_processor_cache_gb * 2**30))
        self._encoder: PromptEncoder | None = None
        if self.loaded.encoder_decoder is not None:
            self._encoder = PromptEncoder(self.loaded.model)
        self._sampler = Sampler(self._cuda)
        self._buffers: StepBuffers | None = None

    @property
    def model_info(self) -> ModelInfo:
        """Properties of the model; see ``Executor``."""
        loaded = self.loaded
        images: ImageRules | str = loaded.image_refusal
        if loaded.image_token is not None:
            images = ImageRules(loaded.image_token, self._args.max_images_per_prompt)
        return ModelInfo(
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=tuple(loaded.eos_token_ids),
            device_type=loaded.device.type,
            backends=loaded.describe_backends(),
            pooling=loaded.pooling,
            group_window=group_window(loaded.stored_layers),
            images=images,
            sees_whole_prompts=_sees_whole_prompts(loaded),
            keeps_states=bool(loaded.states),
            encoder_decoder=loaded.encoder_decoder,
        )

    @property
    def buffers(self) -> StepBuffers:
        """Arrays that the core fills before ``launch``; available after ``init_cache``.

        Raises:
            StepError: Before ``init_cache``.
        """
        if self._buffers is None:
            raise StepError("the executor has no KV cache yet: call init_cache first")
        return self._buffers

    def kv_bytes_per_block(self, block_size: int, group_window: int | None = None) -> int:
        """Bytes of one KV block over all layers except those of a window group.

        Raises:
            ConfigError: The attention backend does not support the block size.
        """
        loaded = self.loaded
        loaded.attention_backend.check_block_size(block_size)
        layers, _ = split_layers(loaded.stored_layers, group_window)
        return kv_bytes_per_block(layers, block_size=block_size, dtype=loaded.dtype)

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks; on a GPU the largest steps are profiled."""
        args, cuda = self._args, self._cuda
        if cuda is None:
            args.check_without_gpu()
        # Ranks on the CPU share the same memory.
        num_parts = self._group.size if self._group is not None and cuda is None else 1
        block_bytes = num_parts * self.kv_bytes_per_block(args.block_size, limits.group_window)
        windows = self._window_need(limits, num_parts)
        has_keys = block_bytes > 0 or windows is not None
        available = None
        is_free = args.num_gpu_blocks is None and args.kv_cache_memory is None
        if cuda is not None and has_keys and is_free:
            available = available_memory(
                self.loaded, args, limits, cuda, captures_graphs=self._captures_graphs
            )
        return plan_memory(
            block_bytes=block_bytes,
            state_bytes=state_bytes_per_slot(self.loaded.states),
            max_num_seqs=limits.max_num_rows,
            block_size=args.block_size,
            weight_bytes=num_parts * self.loaded.weight_bytes,
            free_bytes=free_host_bytes() if cuda is None else cuda.memory().free,
            # GPU memory is for the cache; host memory is shared with other programs.
            default_bytes=DEFAULT_KV_CACHE_BYTES if cuda is None else None,
            num_gpu_blocks=args.num_gpu_blocks,
            kv_cache_memory=args.kv_cache_memory,
            max_model_len=args.max_model_len and args.max_model_len + limits.num_lookahead_slots,
            longest=limits.max_model_len + limits.num_lookahead_slots,
            swap_space=args.swap_space,
            free_host_bytes=free_host_bytes(),
            available=available,
            windows=windows,
        )

    def _window_need(self, limits: StepLimits, num_parts: int) -> WindowNeed | None:
        """Requirements of sliding-window layers, if they have separate blocks."""
        if limits.group_window is None:
            return None
        block_size, caches_prefixes = self._args.block_size, self._args.enable_prefix_caching
        _, layers = split_layers(self.loaded.stored_layers, limits.group_window)
        config = SchedulerConfig(
            max_num_seqs=limits.max_num_rows,
            max_num_batched_tokens=limits.max_num_tokens,
            max_model_len=limits.max_model_len,
            num_lookahead_slots=limits.num_lookahead_slots,
            enable_chunked_prefill=True,  # only the limits are used
        )
        blocks_for = partial(
            KVGroup.num_gpu_blocks_for,
            config,
            window=limits.group_window,
            block_size=block_size,
        )
        return WindowNeed(
            window=limits.group_window,
            block_bytes=num_parts
            * kv_bytes_per_block(layers, block_size=block_size, dtype=self.loaded.dtype),
            least_blocks=blocks_for(num_seqs=1),
            # As many again for the ends of cached prefixes.
            most_blocks=blocks_for(num_seqs=limits.max_num_rows * (2 if caches_prefixes else 1)),
        )

    def init_cache(self, shape: CacheShape, memory: StepMemory | None = None) -> None:
        """Allocate pools and step buffers; ``memory`` is shared memory that other ranks read."""
        loaded, limits = self.loaded, shape.limits
        self._cache = CacheEngine(
            loaded.stored_layers,
            num_gpu_blocks=shape.num_gpu_blocks,
            num_cpu_blocks=shape.num_cpu_blocks,
            block_size=shape.block_size,
            dtype=loaded.dtype,
            device=loaded.device,
            cuda=self._cuda,
            groups=shape.groups,
            states=loaded.states,
        )
        has_kernels = self._adapters is not None and loaded.attention_backend.can_record_graphs
        known = loaded.encoder_decoder
        buffers = StepBuffers(
            max_num_tokens=limits.max_num_tokens,
            max_num_rows=limits.max_num_rows,
            max_num_samples=limits.max_num_samples,
            max_blocks_per_row=-(
                -(limits.max_model_len + limits.num_lookahead_slots) // shape.block_size
            ),
            has_adapters=self._adapters is not None,
            num_adapter_slots=self._args.max_loras if has_kernels else 0,
            max_cross_blocks=0 if known is None else -(-known.max_encoder_len // shape.block_size),
            groups=shape.groups,
            memory=memory,
            cuda=self._cuda,
        )
        forward = Forward(loaded, self._cache)
        graphs = None
        if self._cuda is not None and self._captures_graphs:
            sizes = ladder(limits.max_num_rows)
            graphs = DecodeGraphs(forward, buffers, sizes=sizes, block_size=shape.block_size)
            has_adapters = self._adapters is not None
            graphs.capture(loaded.vocab_size, self._cuda, has_adapters=has_adapters)
        self._runner = ModelRunner(forward, buffers, shape.block_size, graphs, self._adapters)
        self._buffers = buffers

    def check(self) -> None:
        """Do nothing: a single process is alive."""

    def restart(self) -> None:
        """Reload everything that died; pools and their contents are lost."""

    def shutdown(self) -> None:
        """Stop its processes and free weights and pools; no step may be running."""
        for name in _MEMORY:
            self.__dict__.pop(name, None)
        self._buffers = None
        if (cuda := getattr(self, "_cuda", None)) is not None:  # not after a failed restart
            cuda.release_unused()

    def load_adapter(self, name: str, path: str) -> HostAdapter:
        """Load the adapter of a directory into host memory; thread-safe, callable during a step."""
        return self._host_adapters.load(name, path)

    def drop_adapter(self, ordinal: int) -> None:
        """Evict an adapter from host memory once it is no longer referenced; see ``Executor``."""
        self._host_adapters.drop(ordinal)

    def image_positions(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> NDArray[np.int64] | None:
        """Positions ``[3, P]`` of a prompt of P tokens, for models with 3D positions."""
        return image_positions(self.loaded.model, token_ids, images)

    def encode_images(self, images: Sequence[PlacedImage]) -> None:
        """Compute the features of images for the next launched step; see ``Executor``."""
        self._tower.encode(images)

    def encode_prompts(self, prompts: Mapping[int, EncoderInput]) -> None:
        """Compute the encoder's states of prompts, by row, for the next launched step."""
        assert self._encoder is not None  # noqa: S101  # called for encoder-decoders only
        self._encoder.encode(prompts)

    def launch(
        self,
        scheduled: SchedulerOutputs,
        rows: Sequence[RowSampling],
        prompts: PromptTargets | None = None,
        after: StepHandle | None = None,
        images: Mapping[int, PromptImages] | None = None,
    ) -> LaunchedRun:
        """Launch one step: moves, adapters, forward pass, sampling; see ``Executor``."""
        if scheduled.num_rows and len(rows) != scheduled.num_samples:
            raise StepError(f"{len(rows)} sampling parameters for {scheduled.num_samples} samples")
        if self._adapters is not None:
            for ordinal, slot in scheduled.adapters_to_load:
                self._adapters.load(slot, self._host_adapters.weights(ordinal))
        if scheduled.num_rows == 0:
            self.forward(scheduled)
            return LaunchedRun()
        if self.loaded.pooling is not None:
            self._cache.move(scheduled)
            return LaunchedRun(pooled=self._pool(scheduled, self.loaded.pooling, rows))
        index = None if prompts is None else torch.from_numpy(prompts.index)
        previous_tokens = after.tokens() if isinstance(after, LaunchedRun) else None
        of_step = None
        if images is not None:
            ends = self.buffers.query_start[: scheduled.num_rows + 1]
            of_step = self._tower.of_step(images, ends, self.buffers.positions)
        cross = None
        if self._encoder is not None:
            layout = self.buffers.layout(scheduled, self._cache.block_size)
            sizes = scheduled.num_rows, scheduled.table_widths[-1]
            cross = self._encoder.of_step(layout, *self.buffers.cross_tables(*sizes))
        logits = self.forward(scheduled, index, previous_tokens, of_step, cross)
        samples = self._sampler.launch(logits[: len(rows)], rows) if rows else None
        return LaunchedRun(samples, prompts, logits[len(rows) :])

    def forward(
        self,
        step: StepWork,
        more_index: Tensor | None = None,
        previous_tokens: Tensor | None = None,
        images: StepImages | None = None,
        cross: CrossStep | None = None,
    ) -> Tensor:
        """Move blocks, and run the model on a step.

        Args:
            step: Sizes and moves of the step; without rows only the moves are done.
            more_index: As in ``ModelRunner.execute``.
            previous_tokens: As in ``ModelRunner.execute``.
            images: As in ``ModelRunner.execute``.
            cross: As in ``ModelRunner.execute``.

        Returns:
            Logits, float32 ``[S + P, V]``.
        """
        self._cache.move(step)
        if step.num_rows == 0:
            return torch.empty(0, self.loaded.vocab_size)
        return self._runner.execute(step, more_index, previous_tokens, images, cross)

    def _pool(
        self, scheduled: SchedulerOutputs, rules: PoolingRules, rows: Sequence[RowSampling]
    ) -> Tensor:
        """Pool each prompt that ends in the step, float32 ``[S, F]``."""
        if rules.pooling_type == "LAST":
            return self._runner.execute(scheduled)
        sampled = self.buffers.sample_rows[: scheduled.num_samples]
        ends = self.buffers.query_start[: scheduled.num_rows + 1]
        types = token_types(ends, sampled, [row.pair_start for row in rows])
        states = self._runner.hidden_states(scheduled, types)
        vectors = pool_rows(states, ends, rules.pooling_type)
        vectors = vectors[torch.from_numpy(sampled.copy()).to(vectors.device)]
        return vectors if self.loaded.head is None else self.loaded.head(vectors)


def _check_options(args: EngineArgs, loaded: LoadedModel) -> None:
    """Refuse options that pooling models or encoder-decoders do not support."""
    refused = {}
    if loaded.encoder_decoder is not None:
        refused["enable_lora"] = "adapters are for decoder-only models"
        refused["enable_prefix_caching"] = "a decoder's keys depend on what its encoder read"
        refused["speculative_config"] = "draft tokens are for decoder-only models"
    if loaded.pooling is not None:
        refused["enable_lora"] = "adapters are for models that generate"
        refused["speculative_config"] = "draft tokens are for models that generate"
    if loaded.pooling is not None and _sees_whole_prompts(loaded):
        reason = f"the model pools ({loaded.pooling.pooling_type}) what one step computes"
        refused |= dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill"), reason)
    for name, reason in refused.items():
        if value := getattr(args, name):
            raise ConfigError(f"{name} is {value}, and {reason}: leave it out")


def _sees_whole_prompts(loaded: LoadedModel) -> bool:
    """See ``ModelInfo.sees_whole_prompts``."""
    pools_others = loaded.pooling is not None and loaded.pooling.pooling_type != "LAST"
    return loaded.is_encoder or pools_others
