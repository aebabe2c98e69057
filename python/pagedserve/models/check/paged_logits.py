"""Logits of a model over paged KV for a few tokens, without an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve._core import KVGroup
from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.cross import CrossStep, EncoderDecoderAttention
from pagedserve.attention.interface import PagedAttention
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.cache.engine import CacheEngine
from pagedserve.cache.layers import LayerShape
from pagedserve.cache.states import LayerStates
from pagedserve.inputs.prompt_images import PromptImages
from pagedserve.models.forward import (
    ForwardContext,
    StepImages,
    decoder_logits,
    flat_batch_hidden_states,
    flat_batch_logits,
)
from pagedserve.models.image_features import step_images
from pagedserve.models.states import PooledStates


def paged_logits(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    prompts: list[Tensor],
    first: list[int],
    backend: AttentionBackend,
    *,
    rows: list[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    selects_logits: bool = True,
    states: LayerStates = (),
    images: Mapping[int, PromptImages] | None = None,
    features: Mapping[bytes, Tensor] | None = None,
) -> list[Tensor]:
    """Each prompt's logits float32 ``[rows, V]`` over paged KV that is initialized with NaN.

    Args:
        model: loaded with our attention function.
        layers: KV shapes of its attention calls.
        prompts: token ids.
        first: tokens of each prompt in the first of two steps; the rest is the second step.
        backend: attention backend.
        rows: positions of each prompt that need logits, in any order; None is all.
        dtype: dtype of keys and values; None is the model's.
        selects_logits: see `flat_batch_logits`.
        states: shapes of its recurrent states.
        images: images of the prompts that have some.
        features: features of these, by their digests.
    """
    rows = [torch.arange(len(prompt)) for prompt in prompts] if rows is None else rows
    cache = _cache_of_nan(
        model, layers, prompts, backend, states=states, dtype=dtype or model.dtype
    )
    places = [(row, int(position)) for row, wanted in enumerate(rows) for position in wanted]
    found: dict[tuple[int, int], Tensor] = {}
    steps = [[(0, end) for end in first]]
    steps.append([(end, len(prompt)) for end, prompt in zip(first, prompts, strict=True)])
    for spans in steps:
        if all(start == end for start, end in spans):
            continue
        batch = _FlatBatch.of(prompts, spans, cache)
        wanted = [place for place in places if place in batch.places]
        index = torch.tensor([batch.places[place] for place in wanted])
        in_images = batch.images(images or {}, features or {}, model.device)
        context = ForwardContext(
            attention=_attention(layers, cache.gpu_pools, backend, batch),
            positions=batch.positions.to(model.device),
            states=PooledStates(states, cache.states.device, batch.metadata.layout, model.device),
        )
        logits = flat_logits(
            model,
            batch.tokens,
            context,
            index=index,
            selects_logits=selects_logits,
            images=in_images,
        )
        found |= dict(zip(wanted, logits, strict=True))
    return [
        torch.stack([found[row, int(position)] for position in wanted])
        for row, wanted in enumerate(rows)
    ]


@torch.inference_mode()
def encoder_hidden_states(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    prompts: list[Tensor],
    backend: AttentionBackend,
) -> list[Tensor]:
    """Each prompt's states ``[tokens, F]``, in one step over one pool initialized with NaN.

    Args:
        model: an encoder, loaded with our attention function.
        layers: KV shapes of its attention calls.
        prompts: token ids.
        backend: attention backend.
    """
    cache = _cache_of_nan(model, layers[:1], prompts, backend, states=(), dtype=model.dtype)
    batch = _FlatBatch.of(prompts, [(0, len(prompt)) for prompt in prompts], cache)
    pools = cache.gpu_pools * len(layers)
    attention = _attention(layers, pools, backend, batch, causal=False)
    context = ForwardContext(attention=attention, positions=batch.positions.to(model.device))
    states = flat_batch_hidden_states(model, batch.tokens[None], context)
    return list(states.split([len(prompt) for prompt in prompts]))


@torch.inference_mode()
def encoder_decoder_logits(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    prompts: list[Tensor],
    states: list[Tensor],
    backend: AttentionBackend,
) -> list[Tensor]:
    """Each prompt's logits float32 ``[tokens, V]``, over paged KV that is initialized with NaN.

    The first step has all tokens but the last of each prompt, and writes the encoders' keys.

    Args:
        model: an encoder-decoder, loaded with our attention function.
        layers: KV shapes of its decoder's attention calls.
        prompts: prompts of the decoder.
        states: ``[S, F]``, states of each prompt's encoder.
        backend: attention backend.
    """
    stored = tuple(layer for layer in layers if not layer.is_cross)
    # A slot for each token or state: the encoders' blocks come after those of the prompts.
    cache = _cache_of_nan(model, stored, [*prompts, *states], backend, states=(), dtype=model.dtype)
    width = len(cache.gpu_pools[0]) // (2 * len(prompts))
    tables = np.arange(width * len(prompts), dtype=np.int32) + width * len(prompts)
    lens = np.array([len(of_prompt) for of_prompt in states], dtype=np.int32)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for is_first in (True, False):
        ends = [len(prompt) - 1 for prompt in prompts]
        spans = [(0, end) if is_first else (end, end + 1) for end in ends]
        batch = _FlatBatch.of(prompts, spans, cache)
        step = CrossStep.of(
            batch.metadata.layout,
            lens,
            tables.reshape(len(prompts), width),
            dict(enumerate(states)) if is_first else {},
            torch.zeros_like(states[0][:1]),
        )
        context = ForwardContext(
            attention=EncoderDecoderAttention(batch.metadata, cache.gpu_pools, backend, step),
            positions=batch.positions.to(model.device),
            encoder_states=step.states,
        )
        logits = decoder_logits(model, batch.tokens[None], context)
        for row, of_row in enumerate(logits.float().split([end - start for start, end in spans])):
            found[row].append(of_row)
    return [torch.cat(of_prompt) for of_prompt in found]


@torch.inference_mode()
def flat_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    context: ForwardContext | None = None,
    *,
    index: Tensor,
    selects_logits: bool,
    images: StepImages | None = None,
) -> Tensor:
    """Logits float32 ``[N, V]`` of positions ``index`` in a flat batch of tokens ``[T]``."""
    return flat_batch_logits(
        model,
        tokens[None],
        context,
        index.to(model.device),
        selects_logits=selects_logits,
        images=images,
    ).float()


def _cache_of_nan(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    prompts: list[Tensor],
    backend: AttentionBackend,
    *,
    states: LayerStates,
    dtype: torch.dtype,
) -> CacheEngine:
    """A cache with as many blocks for each prompt as the longest needs, and a state slot."""
    block_size = backend.min_block_size
    cache = CacheEngine(
        layers,
        num_gpu_blocks=len(prompts) * -(-max(map(len, prompts)) // block_size),
        num_cpu_blocks=0,
        block_size=block_size,
        dtype=dtype,
        device=model.device,
        states=states,
        groups=[KVGroup("state", num_gpu_blocks=len(prompts))],
    )
    for pool in (*cache.gpu_pools, *chain.from_iterable(cache.states.device)):
        pool.fill_(torch.nan)
    return cache


def _attention(
    layers: tuple[LayerShape, ...],
    pools: Sequence[Tensor],
    backend: AttentionBackend,
    batch: "_FlatBatch",
    *,
    causal: bool = True,
) -> PagedAttention:
    windows = [layer.window for layer in layers]
    return PagedAttention(batch.metadata, pools, windows, backend, causal=causal)


@dataclass(frozen=True, slots=True)
class _FlatBatch:
    """A step of some of the prompts' tokens.

    Attributes:
        metadata: rows of the step, and slots of its tokens.
        tokens: ``[T]``.
        positions: ``[1, T]``, in host memory.
        places: index in T of a position of a prompt.
        rows: prompt of each of its rows.
    """

    metadata: AttentionMetadata
    tokens: Tensor
    positions: Tensor
    places: dict[tuple[int, int], int]
    rows: list[int]

    def images(
        self,
        images: Mapping[int, PromptImages],
        features: Mapping[bytes, Tensor],
        device: torch.device,
    ) -> StepImages | None:
        """Image inputs of the step; see `step_images`."""
        of_rows = {row: images[prompt] for row, prompt in enumerate(self.rows) if prompt in images}
        positions = self.positions[0].numpy()
        return step_images(of_rows, self.metadata.layout.query_start, positions, features, device)

    @classmethod
    def of(
        cls,
        prompts: list[Tensor],
        spans: list[tuple[int, int]],
        cache: CacheEngine,
    ) -> "_FlatBatch":
        """Create from the tokens of each prompt's span; the last prompt's blocks come first."""
        block_size = cache.block_size
        blocks_per_row = -(-max(map(len, prompts)) // block_size)
        tables = np.arange(len(prompts) * blocks_per_row, dtype=np.int32)[::-1]
        tables = tables.reshape(len(prompts), -1)
        rows = [row for row, (start, end) in enumerate(spans) if end > start]
        positions = [np.arange(*spans[row]) for row in rows]
        slots = [
            tables[row, position // block_size].astype(np.int64) * block_size
            + position % block_size
            for row, position in zip(rows, positions, strict=True)
        ]
        layout = BatchLayout(
            query_start=np.cumsum([0, *map(len, positions)]).astype(np.int32),
            seq_lens=np.array([spans[row][1] for row in rows], dtype=np.int32),
            block_tables=tables[rows],
            block_size=block_size,
            state_slots=len(prompts) - 1 - np.array(rows, dtype=np.int32),
        )
        slot_mapping = torch.from_numpy(np.concatenate(slots))
        pairs = [(row, position) for row in rows for position in range(*spans[row])]
        return cls(
            metadata=AttentionMetadata(layout, slot_mapping.to(prompts[0].device)),
            tokens=torch.cat([prompts[row][slice(*spans[row])] for row in rows]),
            positions=torch.from_numpy(np.concatenate(positions))[None],
            places={pair: place for place, pair in enumerate(pairs)},
            rows=rows,
        )
