"""Executor in one process: one device with its model and KV pools."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve._core import SchedulerConfig, WindowGroup
from pagedserve.attention.backends import check_block_size
from pagedserve.attention.cross import CrossStep
from pagedserve.cache.engine import (
    CacheEngine,
    common_window,
    group_window,
    kv_bytes_per_block,
    split_layers,
)
from pagedserve.cache.states import state_bytes_per_slot
from pagedserve.config import EngineArgs
from pagedserve.device import cuda_of
from pagedserve.errors import ConfigError, StepError
from pagedserve.executor.launched import LaunchedRun, tokens_of
from pagedserve.executor.memory import (
    DEFAULT_KV_CACHE_BYTES,
    MemoryPlan,
    WindowNeed,
    free_host_bytes,
    plan_memory,
)
from pagedserve.executor.model_step import ModelStep
from pagedserve.executor.profile import available_memory
from pagedserve.executor.protocol import CacheShape, ModelInfo, StepInput, StepLimits, StepSizes
from pagedserve.images import ImageRules
from pagedserve.lora.apply import AdapterModules
from pagedserve.lora.host import HostAdapter, HostAdapters
from pagedserve.models.image_features import image_positions
from pagedserve.models.loader import LoadedModel, load_model
from pagedserve.models.prompt_images import PlacedImage
from pagedserve.parallel.group import RankGroup
from pagedserve.pooling.pooler import pool_rows
from pagedserve.pooling.pooler import token_types as find_token_types
from pagedserve.pooling.rules import PoolingRules
from pagedserve.runner.buffers import StepBuffers, StepMemory
from pagedserve.runner.encoder import PromptEncoder
from pagedserve.runner.graphs import DecodeGraphs
from pagedserve.runner.images import ImageTower, on_device
from pagedserve.runner.model_runner import Forward, ModelRunner
from pagedserve.runner.padded import ladder
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
        is_recordable = self._cuda is not None and self.loaded.attention_backend == "triton"
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
            sliding_window=common_window(loaded.layers),
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
        check_block_size(loaded.attention_backend, block_size)
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
        available = None
        is_free = args.num_gpu_blocks is None and args.kv_cache_memory is None
        if cuda is not None and block_bytes and is_free:
            available = available_memory(
                self.loaded, args, limits, cuda, captures_graphs=self._captures_graphs
            )
        windows = self._window_need(limits, num_parts)
        num_gpu_blocks = args.num_gpu_blocks
        if not block_bytes and num_gpu_blocks is None:  # empty blocks, for all sequences
            num_gpu_blocks = limits.max_num_rows * -(-limits.max_model_len // args.block_size)
        return plan_memory(
            block_bytes=block_bytes,
            state_bytes=state_bytes_per_slot(self.loaded.states),
            max_num_seqs=limits.max_num_rows,
            block_size=args.block_size,
            weight_bytes=num_parts * self.loaded.weight_bytes,
            free_bytes=free_host_bytes() if cuda is None else cuda.memory().free,
            # GPU memory is for the cache; host memory is shared with other programs.
            default_bytes=DEFAULT_KV_CACHE_BYTES if cuda is None else None,
            num_gpu_blocks=num_gpu_blocks,
            kv_cache_memory=args.kv_cache_memory,
            max_model_len=args.max_model_len and args.max_model_len + limits.num_lookahead_slots,
            window=limits.window,
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
            WindowGroup.num_gpu_blocks_for,
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
            window_group=shape.window_group,
            states=loaded.states,
            num_state_slots=shape.num_state_slots,
            num_cpu_state_slots=shape.num_cpu_state_slots,
        )
        has_kernels = self._adapters is not None and loaded.attention_backend == "triton"
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
            has_windows=shape.window_group is not None,
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

    def launch(self, step: StepInput) -> LaunchedRun:
        """Launch one step: encoders, adapters, moves, forward pass, sampling; see ``Executor``."""
        sizes, rows = step.sizes, step.rows
        if sizes.num_rows and len(rows) != sizes.num_samples:
            raise StepError(f"{len(rows)} sampling parameters for {sizes.num_samples} samples")
        states, failed = self._encode(step)
        if failed:
            return LaunchedRun(failed=failed)
        found = self.forward(self._model_step(step, states), tokens_of(step.after))
        if sizes.num_rows == 0:
            return LaunchedRun()
        if self.loaded.pooling is not None:
            return LaunchedRun(pooled=self._pool(sizes, self.loaded.pooling, found))
        samples = self._sampler.launch(found[: len(rows)], rows) if rows else None
        return LaunchedRun(samples, step.prompts, found[len(rows) :])

    def _encode(self, step: StepInput) -> tuple[Mapping[int, Tensor], Mapping[int, str]]:
        """Run the encoders on a step's images and encoder inputs.

        Returns:
            Encoder states of the prompts that start in the step, by row, and the error of each row
            that failed.
        """
        if step.images:
            buffers = self.buffers
            return {}, self._tower.encode(step.images, buffers.query_start, buffers.positions)
        if step.encoder_inputs and self._encoder is not None:
            return self._encoder.encode(step.encoder_inputs)
        return {}, {}

    def _model_step(self, step: StepInput, states: Mapping[int, Tensor]) -> ModelStep:
        """The model's input of a step whose images are encoded; ``states`` are an encoder's."""
        ends = self.buffers.query_start[: step.sizes.num_rows + 1]
        images = token_types = None
        if step.images:
            images = self._tower.of_step(step.images, ends, self.buffers.positions)
        if _pools_others(self.loaded):
            sampled = self.buffers.sample_rows[: step.sizes.num_samples]
            token_types = find_token_types(ends, sampled, [row.pair_start for row in step.rows])
        return ModelStep(
            sizes=step.sizes,
            moves=step.moves,
            adapters=[
                (slot, self._host_adapters.weights(ordinal)) for ordinal, slot in step.adapters
            ],
            more_index=None if step.prompts is None else torch.from_numpy(step.prompts.index),
            images=images,
            encoder_states=states,
            token_types=token_types,
        )

    def forward(self, step: ModelStep, previous_tokens: Tensor | None = None) -> Tensor:
        """Load adapters, move blocks, and run the model.

        Args:
            step: The step; its arrays are in the buffers.
            previous_tokens: As in ``ModelRunner.execute``.

        Returns:
            Logits, float32 ``[S + P, V]``; for a pooling model states, ``[S, F]`` if it pools the
            last token of each prompt and ``[T, F]`` if others.
        """
        for slot, weights in step.adapters:
            assert self._adapters is not None  # noqa: S101  # no other model has adapters
            self._adapters.load(slot, weights)
        self._cache.move(step.moves)
        if step.sizes.num_rows == 0:
            return torch.empty(0, self.loaded.vocab_size)
        if _pools_others(self.loaded):
            return self._runner.hidden_states(step.sizes, step.token_types)
        images = None if step.images is None else on_device(step.images, self.loaded.device)
        return self._runner.execute(
            step.sizes, step.more_index, previous_tokens, images, self._cross(step)
        )

    def _cross(self, step: ModelStep) -> CrossStep | None:
        """Cross-attention inputs of a step; None for a decoder-only model."""
        if self._encoder is None:
            return None
        sizes, buffers = step.sizes, self.buffers
        tables = buffers.cross_tables(sizes.num_rows, sizes.max_num_cross_blocks)
        layout = buffers.layout(sizes, self._cache.block_size)
        return self._encoder.of_step(layout, *tables, step.encoder_states)

    def _pool(self, sizes: StepSizes, rules: PoolingRules, states: Tensor) -> Tensor:
        """Pool each prompt that ends in the step, float32 ``[S, F]``; see ``forward``."""
        if not _pools_others(self.loaded):
            return states
        sampled = self.buffers.sample_rows[: sizes.num_samples]
        ends = self.buffers.query_start[: sizes.num_rows + 1]
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
    return loaded.is_encoder or _pools_others(loaded)


def _pools_others(loaded: LoadedModel) -> bool:
    """Whether it pools the states of other tokens than the last."""
    return loaded.pooling is not None and loaded.pooling.pooling_type != "LAST"
