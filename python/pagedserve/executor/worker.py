"""``Worker``: one device with a model, or a rank's shard of it, its KV pools and forward pass."""

from functools import partial

import torch
from torch import Tensor

from pagedserve.attention.cross import CrossStep
from pagedserve.cache.engine import CacheEngine, kv_format
from pagedserve.cache.layers import group_kind, group_window
from pagedserve.cache.states import state_bytes_per_slot
from pagedserve.config import EngineArgs
from pagedserve.device import cuda_of
from pagedserve.errors import StepError
from pagedserve.executor.kv_plan import plan_kv_cache
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.model_options import check_model_options
from pagedserve.executor.model_step import ModelStep
from pagedserve.executor.profile import available_memory
from pagedserve.executor.protocol import CacheShape, ModelInfo, StepLimits
from pagedserve.host_ops.capabilities import pool_dtype
from pagedserve.inputs.images import ImageRules
from pagedserve.lora.apply import AdapterModules
from pagedserve.models.encoder_decoder import no_states
from pagedserve.models.load.sources import num_file_bytes
from pagedserve.models.loader import LoadedModel, load_model
from pagedserve.parallel.group import RankGroup
from pagedserve.runner.buffers import StepBuffers, StepMemory
from pagedserve.runner.graphs import DecodeGraphs
from pagedserve.runner.images import on_device
from pagedserve.runner.model_runner import Forward, ModelRunner
from pagedserve.runner.padded import ladder


class Worker:
    """Runs the model of steps on one device.

    Attributes:
        loaded: The model.
        cuda: Its device; None for a model in host memory.
        adapters: Modules of the model that can have adapters; None without adapters.
        cache: KV pools; available after ``init_cache``, as is the next.
        runner: Runs the model over them.
    """

    cache: CacheEngine
    runner: ModelRunner

    def __init__(self, args: EngineArgs, group: RankGroup | None = None) -> None:
        """Load the model; see `pagedserve.models.loader.load_model` for the errors.

        Args:
            args: Options of the engine.
            group: Group of the ranks that share the model; None for a single process.

        Raises:
            ConfigError: The model does not support an option.
        """
        self._args = args
        self._group = group
        self.loaded = load_model(args, group=group)
        self._num_file_bytes = num_file_bytes(args)
        check_model_options(args, self.model_info)
        self.cuda = cuda_of(self.loaded.device)
        is_recordable = self.cuda is not None and self.loaded.attention_backend.can_record_graphs
        # How rows with states are batched depends on the step; pooling models only prefill.
        is_decoding = not self.loaded.states and self.loaded.pooling is None
        self._captures_graphs = is_recordable and is_decoding and not args.enforce_eager
        self.adapters: AdapterModules | None = None
        if args.enable_lora:
            self.adapters = AdapterModules(
                self.loaded, num_slots=args.max_loras, max_rank=args.max_lora_rank
            )
        self._no_states: Tensor | None = None
        if self.loaded.encoder_decoder is not None:
            self._no_states = no_states(self.loaded.model)
        self._buffers: StepBuffers | None = None

    @property
    def _num_ranks(self) -> int:
        return 1 if self._group is None else self._group.size

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the model."""
        return self._group is not None

    @property
    def model_info(self) -> ModelInfo:
        """Properties of the model."""
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
            group_kind=group_kind(loaded.stored_layers),
            images=images,
            sees_whole_prompts=_sees_whole_prompts(loaded),
            keeps_states=bool(loaded.states),
            encoder_decoder=loaded.encoder_decoder,
            dtype=str(loaded.dtype).removeprefix("torch."),
            file_bytes=self._num_file_bytes,
            weight_bytes=self._num_ranks * loaded.weight_bytes,
        )

    @property
    def buffers(self) -> StepBuffers:
        """Arrays of a step, which the core fills; available after ``init_cache``.

        Raises:
            StepError: Before ``init_cache``.
        """
        if self._buffers is None:
            raise StepError("the executor has no KV cache yet: call init_cache first")
        return self._buffers

    @property
    def _pool_dtype(self) -> torch.dtype:
        """Dtype of the KV pools; an encoder's last for a step, and store the model's."""
        loaded = self.loaded
        cache_dtype = "auto" if loaded.is_encoder else self._args.kv_cache_dtype
        return pool_dtype(cache_dtype, loaded.dtype)

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks; on a GPU the largest steps are profiled.

        Raises:
            ConfigError: The attention backend does not support the block size, or memory is short.
        """
        args, cuda, loaded = self._args, self.cuda, self.loaded
        if cuda is None:
            args.check_without_gpu()
        loaded.attention_backend.check_block_size(args.block_size)
        for layer in () if loaded.is_encoder else loaded.stored_layers:
            args.check_head_size(layer.value_size)
        plan = partial(
            plan_kv_cache,
            args,
            limits,
            loaded.stored_layers,
            kv_format=kv_format(self._pool_dtype),
            weight_bytes=loaded.weight_bytes,
            state_bytes=state_bytes_per_slot(loaded.states),
        )
        if cuda is None:
            # Ranks on the CPU share the same memory.
            return plan(num_parts=self._num_ranks)
        profile = partial(
            available_memory, loaded, args, limits, cuda, captures_graphs=self._captures_graphs
        )
        return plan(free_bytes=lambda: cuda.memory().free, profile=profile)

    def init_cache(self, shape: CacheShape, memory: StepMemory | None = None) -> None:
        """Allocate pools and step buffers; ``memory`` is shared memory that other ranks read."""
        loaded, limits = self.loaded, shape.limits
        self.cache = CacheEngine(
            loaded.stored_layers,
            num_gpu_blocks=shape.num_gpu_blocks,
            num_cpu_blocks=shape.num_cpu_blocks,
            block_size=shape.block_size,
            dtype=self._pool_dtype,
            device=loaded.device,
            cuda=self.cuda,
            groups=shape.groups,
            states=loaded.states,
        )
        has_kernels = self.adapters is not None and loaded.attention_backend.can_record_graphs
        known = loaded.encoder_decoder
        buffers = StepBuffers(
            max_num_tokens=limits.max_num_tokens,
            max_num_rows=limits.max_num_rows,
            max_num_samples=limits.max_num_samples,
            max_blocks_per_row=shape.max_blocks_per_row,
            has_adapters=self.adapters is not None,
            num_adapter_slots=self._args.max_loras if has_kernels else 0,
            max_cross_blocks=0 if known is None else -(-known.max_encoder_len // shape.block_size),
            groups=shape.groups,
            memory=memory,
            cuda=self.cuda,
        )
        forward = Forward(loaded, self.cache)
        graphs = None
        if self.cuda is not None and self._captures_graphs:
            sizes = ladder(limits.max_num_rows)
            graphs = DecodeGraphs(forward, buffers, sizes=sizes, block_size=shape.block_size)
            has_adapters = self.adapters is not None
            graphs.capture(loaded.vocab_size, self.cuda, has_adapters=has_adapters)
        self.runner = ModelRunner(forward, buffers, shape.block_size, graphs, self.adapters)
        self._buffers = buffers

    def forward(self, step: ModelStep, previous_tokens: Tensor | None = None) -> Tensor:
        """Load adapters, move blocks, and run the model.

        Args:
            step: The step; its arrays are in the buffers.
            previous_tokens: As in ``ModelRunner.execute``.

        Returns:
            Logits, float32 ``[S + P, V]``; for a pooling model states, ``[S, F]`` if it pools the
            last token of each prompt and ``[T, F]`` if others.
        """
        extras = step.extras
        for slot, weights in extras.adapters:
            assert self.adapters is not None  # noqa: S101  # no other model has adapters
            self.adapters.load(slot, weights)
        if extras.state_slots is not None:
            self.buffers.state_slots[: step.sizes.num_rows] = extras.state_slots
        if step.moves:
            self.cache.move(step.moves)
        if step.sizes.num_rows == 0:
            return torch.empty(0, self.loaded.vocab_size)
        if pools_others(self.loaded):
            types = extras.token_types
            return self.runner.hidden_states(
                step.sizes, None if types is None else torch.from_numpy(types)
            )
        images = None if extras.images is None else on_device(extras.images, self.loaded.device)
        return self.runner.execute(
            step.sizes, step.more_index, previous_tokens, images, self._cross(step)
        )

    def _cross(self, step: ModelStep) -> CrossStep | None:
        """Cross-attention inputs of a step; None for a decoder-only model."""
        if self._no_states is None:
            return None
        sizes, buffers = step.sizes, self.buffers
        tables = step.extras.cross
        if tables is None:
            tables = buffers.cross_tables(sizes.num_rows, sizes.max_num_cross_blocks)
        layout = buffers.layout(sizes, self.cache.block_size)
        return CrossStep.of(layout, *tables, step.extras.encoder_states, self._no_states)


def _sees_whole_prompts(loaded: LoadedModel) -> bool:
    """See ``ModelInfo.sees_whole_prompts``."""
    return loaded.is_encoder or pools_others(loaded)


def pools_others(loaded: LoadedModel) -> bool:
    """Whether a model pools the states of other tokens than the last of each prompt."""
    return loaded.pooling is not None and loaded.pooling.pools_whole_prompts
