"""``NativeExecutor``: a native model in the engine's process; an ``Executor`` without torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import instructions_in_use
from pagedserve.cache.layers import group_window
from pagedserve.config import EngineArgs
from pagedserve.errors import StepError
from pagedserve.executor.kv_plan import plan_kv_cache
from pagedserve.executor.launched import LaunchedRun, tokens_of
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.model_options import check_model_options
from pagedserve.executor.numpy_buffers import NumpyBuffers, StepArrays
from pagedserve.executor.protocol import CacheShape, ModelInfo, StepInput, StepLimits
from pagedserve.inputs.prompt_images import PlacedImage
from pagedserve.lora.host import HostAdapter
from pagedserve.models.load.sources import num_file_bytes
from pagedserve.native.adapters import NativeAdapters
from pagedserve.native.choice import gives_tensors
from pagedserve.native.load import LoadedNative
from pagedserve.native.pools import KVPools, kv_format
from pagedserve.pooling.pooler import pool_rows
from pagedserve.pooling.rules import PoolingRules
from pagedserve.sampling.on_host import HostOps
from pagedserve.sampling.processors import run_on_array, run_on_tensor
from pagedserve.sampling.sampler import Sampler


class NativeExecutor:
    """Runs steps of a loaded model in this process; an ``Executor``."""

    def __init__(self, args: EngineArgs, loaded: LoadedNative) -> None:
        """Run a model that `pagedserve.native.load.load_native` has loaded for these options."""
        self._args = args
        self._loaded: LoadedNative | None = loaded
        self._num_file_bytes = num_file_bytes(args)
        check_model_options(args, self.model_info)
        self._buffers: NumpyBuffers | None = None
        self._pools: KVPools | None = None
        self._adapters: NativeAdapters | None = NativeAdapters(args, loaded.model)
        num_threads = loaded.model.num_threads
        run = run_on_tensor if gives_tensors(args) else run_on_array
        self._ops = HostOps(run, num_threads=lambda: num_threads)
        self._sampler = Sampler(self._ops)

    @property
    def loaded(self) -> LoadedNative:
        """The model.

        Raises:
            StepError: The executor was shut down.
        """
        if self._loaded is None:
            raise StepError("the executor was shut down")
        return self._loaded

    @property
    def adapters(self) -> NativeAdapters:
        """Adapters of the model; see ``loaded``."""
        if self._adapters is None:
            raise StepError("the executor was shut down")
        return self._adapters

    @property
    def model_info(self) -> ModelInfo:
        """Properties of the model."""
        loaded = self.loaded
        config, rules = loaded.model.config, loaded.pooling
        kernels = f"{instructions_in_use()}, threads: {loaded.model.num_threads}"
        weights = f"; weights: {self._args.quantization}" if self._args.quantization else ""
        stored = self._args.kv_cache_dtype
        cache = "" if stored == "auto" else f"; KV cache: {stored}"
        return ModelInfo(
            vocab_size=config.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            device_type="cpu",
            backends=f"native ({kernels}){weights}{cache}",
            pooling=rules,
            group_window=group_window(config.layer_shapes),
            sees_whole_prompts=rules is not None and rules.pools_whole_prompts,
            dtype=loaded.model.dtype,
            file_bytes=self._num_file_bytes,
            weight_bytes=loaded.model.weight_bytes,
        )

    @property
    def buffers(self) -> NumpyBuffers:
        """Arrays that the core fills before ``launch``.

        Raises:
            StepError: Before ``init_cache``.
        """
        if self._buffers is None:
            raise StepError("the executor has no KV cache yet: call init_cache first")
        return self._buffers

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks.

        Raises:
            ConfigError: See `plan_kv_cache`.
        """
        args, model = self._args, self.loaded.model
        args.check_without_gpu()
        return plan_kv_cache(
            args,
            limits,
            model.config.layer_shapes,
            kv_format=kv_format(model.dtype, args.kv_cache_dtype),
            weight_bytes=model.weight_bytes,
        )

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate KV pools and step buffers; called once, before the first step."""
        model = self.loaded.model
        self._pools = KVPools(model.config, shape, model.dtype, self._args.kv_cache_dtype)
        self._buffers = NumpyBuffers(shape, has_adapters=self._args.enable_lora)

    def launch(self, step: StepInput) -> LaunchedRun:
        """Load adapters, move blocks, run the model and sample.

        Raises:
            StepError: The numbers of rows and samples differ.
        """
        step.check()
        sizes, rows, model = step.sizes, step.rows, self.loaded.model
        arrays, pools = self.buffers.arrays(sizes), self._pools
        assert pools is not None  # noqa: S101  # the buffers come with them
        if step.adapters:
            self.adapters.load(step.adapters)
        if step.moves:
            pools.move(step.moves, model.num_threads)
        if sizes.num_rows == 0:
            return LaunchedRun()
        if (previous := tokens_of(step.after)) is not None:
            ids = arrays.token_ids
            ids[ids < 0] = previous[-1 - ids[ids < 0]]
        index = arrays.sample_index
        if step.prompts is not None:
            index = np.concatenate((index, step.prompts.index))
        if (rules := self.loaded.pooling) is not None:
            return LaunchedRun(pooled=self._pool(rules, arrays, pools))
        logits = model.outputs(arrays, pools.layers, index)
        samples = self._sampler.launch(logits[: len(rows)], rows) if rows else None
        return LaunchedRun(samples, step.prompts, logits[len(rows) :], ops=self._ops)

    def _pool(self, rules: PoolingRules, arrays: StepArrays, pools: KVPools) -> NDArray[np.float32]:
        """Run the model and pool each prompt that ends in the step, ``[S, F]``."""
        model = self.loaded.model
        if not rules.pools_whole_prompts:
            return model.outputs(arrays, pools.layers, arrays.sample_index)
        every = np.arange(len(arrays.token_ids), dtype=np.int32)
        states = model.outputs(arrays, pools.layers, every)
        vectors = np.stack(pool_rows(states, arrays.query_start, rules.pooling_type))
        return vectors[self.buffers.sample_rows[: len(arrays.sample_index)]]

    def load_adapter(self, name: str, path: str) -> HostAdapter:
        """Load the adapter of a directory into host memory; thread-safe, callable during a step."""
        return self.adapters.host.load(name, path)

    def drop_adapter(self, ordinal: int) -> None:
        """Evict an adapter from host memory once it is no longer referenced."""
        self.adapters.host.drop(ordinal)

    def image_positions(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> NDArray[np.int64] | None:
        """Return None: a token's position is its index."""

    def check(self) -> None:
        """Do nothing: a single process is alive."""

    def restart(self) -> None:
        """Do nothing: nothing has died."""

    def shutdown(self) -> None:
        """Free weights and pools; no step may be running."""
        self._loaded = self._adapters = self._pools = None
