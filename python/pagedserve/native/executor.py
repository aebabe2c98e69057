"""``NativeExecutor``: a native model in the engine's process; an ``Executor`` without torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import instructions_in_use
from pagedserve.cache.layers import group_window, kv_bytes_per_block, split_layers
from pagedserve.config import EngineArgs
from pagedserve.errors import RequestError, StepError
from pagedserve.executor.launched import LaunchedRun, tokens_of
from pagedserve.executor.memory import MemoryPlan, free_host_bytes, plan_memory
from pagedserve.executor.numpy_buffers import NumpyBuffers
from pagedserve.executor.protocol import Adapter, CacheShape, ModelInfo, StepInput, StepLimits
from pagedserve.executor.windows import window_need
from pagedserve.inputs.prompt_images import PlacedImage
from pagedserve.native.load import LoadedNative
from pagedserve.native.numbers import itemsize
from pagedserve.native.pools import KVPools
from pagedserve.sampling.on_host import HostOps
from pagedserve.sampling.sampler import Sampler


class NativeExecutor:
    """Runs steps of a loaded model in this process; an ``Executor``."""

    def __init__(self, args: EngineArgs, loaded: LoadedNative) -> None:
        """Run a model that `pagedserve.native.load.load_native` has loaded for these options."""
        self._args = args
        self._loaded: LoadedNative | None = loaded
        self._buffers: NumpyBuffers | None = None
        self._pools: KVPools | None = None
        num_threads = loaded.model.num_threads
        self._ops = HostOps(num_threads=lambda: num_threads)
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
    def model_info(self) -> ModelInfo:
        """Properties of the model."""
        loaded = self.loaded
        config = loaded.model.config
        kernels = f"{instructions_in_use()}, threads: {loaded.model.num_threads}"
        weights = f"; weights: {self._args.quantization}" if self._args.quantization else ""
        return ModelInfo(
            vocab_size=config.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            device_type="cpu",
            backends=f"native ({kernels}){weights}",
            group_window=group_window(config.layer_shapes),
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
        """Compute the number of KV blocks."""
        args, model = self._args, self.loaded.model
        args.check_without_gpu()
        others, windowed = (
            kv_bytes_per_block(layers, block_size=args.block_size, itemsize=itemsize(model.dtype))
            for layers in split_layers(model.config.layer_shapes, limits.group_window)
        )
        return plan_memory(
            block_bytes=others,
            block_size=args.block_size,
            max_num_seqs=limits.max_num_rows,
            weight_bytes=model.weight_bytes,
            free_bytes=free_host_bytes(),
            num_gpu_blocks=args.num_gpu_blocks,
            kv_cache_memory=args.kv_cache_memory,
            max_model_len=args.max_model_len and args.max_model_len + limits.num_lookahead_slots,
            longest=limits.max_model_len + limits.num_lookahead_slots,
            swap_space=args.swap_space,
            free_host_bytes=free_host_bytes(),
            windows=window_need(
                limits,
                block_size=args.block_size,
                block_bytes=windowed,
                caches_prefixes=bool(args.enable_prefix_caching),
            ),
        )

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate KV pools and step buffers; called once, before the first step."""
        model = self.loaded.model
        self._pools = KVPools(model.config, shape, model.dtype)
        self._buffers = NumpyBuffers(shape)

    def launch(self, step: StepInput) -> LaunchedRun:
        """Move blocks, run the model and sample.

        Raises:
            StepError: The numbers of rows and samples differ.
        """
        step.check()
        sizes, rows, model = step.sizes, step.rows, self.loaded.model
        arrays, pools = self.buffers.arrays(sizes), self._pools
        assert pools is not None  # noqa: S101  # the buffers come with them
        pools.move(step.moves, model.num_threads)
        if sizes.num_rows == 0:
            return LaunchedRun()
        if (previous := tokens_of(step.after)) is not None:
            ids = arrays.token_ids
            ids[ids < 0] = previous[-1 - ids[ids < 0]]
        index = arrays.sample_index
        if step.prompts is not None:
            index = np.concatenate((index, step.prompts.index))
        logits = model.logits(arrays, pools.layers, index)
        samples = self._sampler.launch(logits[: len(rows)], rows) if rows else None
        return LaunchedRun(samples, step.prompts, logits[len(rows) :], ops=self._ops)

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Refuse adapters.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            f"adapter {name!r} at {path}: the native backend has no adapters: give backend='torch'"
        )

    def drop_adapter(self, ordinal: int) -> None:
        """Do nothing: there are no adapters."""

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
        self._loaded = self._pools = None
