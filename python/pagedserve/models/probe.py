"""Finds what a model's attention does by running the model on a few tokens when it is loaded.

A model that computes part of its attention outside of our function would silently give wrong
tokens.  So the probe makes three forwards: one records every attention call, one reads the masks
that the model would have used, and one runs over paged KV, whose logits are compared with those of
the model's own attention.  An architecture that fails one of them is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pagedserve.attention.backends import min_block_size, write_and_attend
from pagedserve.attention.interface import (
    ATTENTION_NAME,
    AttentionCall,
    PagedAttention,
    answering,
    paged_attention_forward,
)
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.cache.engine import CacheEngine, LayerShape
from pagedserve.config import AttentionBackend
from pagedserve.errors import PagedServeError, UnsupportedModelError

_PROBE_NAME = "pagedserve_probe"
# Largest difference of the logits, as a share of the largest logit.
_TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class CallRecorder:
    """Answers attention calls with zeros and keeps what was asked, without the tensors."""

    def __init__(self, masks: "MaskReader | None" = None) -> None:
        """Start empty; `masks` knows the masks of a probe forward."""
        self._masks = masks
        self.layers: list[LayerShape] = []
        self.mask_windows: list[int | None] = []
        self.has_window: list[bool] = []

    def answer(self, call: AttentionCall) -> Tensor:
        """Record the call."""
        self.layers.append(
            LayerShape(
                num_kv_heads=call.key.shape[1],
                key_size=call.key.shape[-1],
                value_size=call.value.shape[-1],
                window=call.options.window,
            )
        )
        self.has_window.append(call.has_window)
        self.mask_windows.append(self._masks.window_of(call.mask) if self._masks else None)
        _, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_zeros(num_tokens, num_heads, call.value.shape[-1])


class MaskReader:
    """A mask function for transformers that reads the rule of a mask instead of making the mask.

    Invariant: masks are told apart by identity, so a mask that a model slices or copies cannot be
    read, but it is never misread.
    """

    def __init__(self, num_positions: int) -> None:
        """Read rules over positions 0 to ``num_positions - 1``."""
        self._num_positions = num_positions
        self._windows: dict[int, tuple[Tensor, int | None]] = {}
        self.max_exact_len = num_positions

    def __call__(
        self, batch_size: int, q_length: int, kv_length: int, *_: Any, **kwargs: Any
    ) -> Tensor:
        """Make a stand-in mask, and remember the window it stands for."""
        mask = torch.zeros(batch_size, 1, q_length, kv_length)
        self._windows[id(mask)] = (mask, self._read(kwargs["mask_function"]))
        return mask

    def window_of(self, mask: object) -> int | None:
        """The sliding window of a mask made here; None for none, or an unreadable mask."""
        return self._windows.get(id(mask), (None, None))[1]

    def _read(self, rule: Any) -> int | None:
        last = self._num_positions - 1
        seen = self._num_visible(rule, last)
        if seen == last + 1:
            return None
        earlier = {last - 1, last - seen}  # in chunks, at least one of them sees another number
        if all(self._num_visible(rule, query) == min(seen, query + 1) for query in earlier):
            return seen
        # Neither full nor a window (chunks, say): it equals full attention for as long as
        # every query still sees the first key.
        first = self._visible(rule, torch.arange(last + 1), torch.tensor(0))
        self.max_exact_len = min(self.max_exact_len, int(first.long().cumprod(0).sum()))
        return None

    def _num_visible(self, rule: Any, query: int) -> int:
        """Keys that a query sees."""
        keys = torch.arange(self._num_positions)
        return int(self._visible(rule, torch.tensor(query), keys).sum())

    def _visible(self, rule: Any, query: Tensor, key: Tensor) -> Tensor:
        zero = torch.tensor(0)
        visible = torch.as_tensor(rule(zero, zero, query, key))
        return visible & (key <= query) & torch.ones_like(query * key).bool()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe found.

    Attributes:
        layers: what each attention call stores, in the order of the calls.
        max_exact_len: up to so many tokens these layers describe the model's attention.
    """

    layers: tuple[LayerShape, ...]
    max_exact_len: int


def probe_model(
    model: PreTrainedModel, *, max_model_len: int, backend: AttentionBackend
) -> ProbeResult:
    """Find what the attention layers of a model do, and check that paged attention computes it.

    Args:
        model: loaded with our attention function.
        max_model_len: positions that the masks are read over.
        backend: computes paged attention.

    Raises:
        UnsupportedModelError: if its attention does not pass through our function once a layer,
            or paged attention gives other logits.
    """
    try:
        result = find_layers(model, max_model_len=max_model_len)
        check_logits(model, result.layers, min(max_model_len, result.max_exact_len), backend)
    except PagedServeError:
        raise
    except Exception as error:  # whatever a foreign model does with a flat batch
        raise UnsupportedModelError(
            f"architecture {architecture(model)} cannot be run: a trial forward over paged "
            f"attention failed with {type(error).__name__}: {error}"
        ) from error
    return result


def find_layers(model: PreTrainedModel, *, max_model_len: int) -> ProbeResult:
    """Run the model on a few tokens and find what its attention layers do.

    Raises:
        UnsupportedModelError: if its attention does not pass through our function once a layer.
    """
    recorder = CallRecorder()
    with answering(recorder):
        _forward(model, _prompt(model, 2))
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(recorder.layers) != num_layers:
        raise UnsupportedModelError(
            f"architecture {architecture(model)} cannot be run: its {num_layers} layers made "
            f"{len(recorder.layers)} calls of the attention interface; accepted are decoder-only "
            "models whose every layer attends through transformers' attention interface"
        )
    masks = MaskReader(max_model_len)
    windows = _mask_windows(model, masks)
    layers = (
        shape if named or window is None else _with_window(shape, window)
        for shape, named, window in zip(recorder.layers, recorder.has_window, windows, strict=True)
    )
    return ProbeResult(tuple(layers), masks.max_exact_len)


def check_logits(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    max_len: int,
    backend: AttentionBackend,
) -> None:
    """Compare logits over paged KV with those of the model's own attention.

    There are two sequences of several blocks: one comes in two chunks, one decodes a token.

    Raises:
        UnsupportedModelError: if they differ.
    """
    block_size = min_block_size(backend)
    lengths = [min(4 * block_size - 2, max_len), min(2 * block_size - 2, max_len)]
    prompts = [_prompt(model, length) for length in lengths]
    with _using_attention(model, "eager"):
        expected = [_forward(model, prompt) for prompt in prompts]
    first = [max(1, lengths[0] - 3), max(1, lengths[1] - 1)]
    got = paged_logits(model, layers, prompts, first, backend)
    for ours, theirs in zip(got, expected, strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        if not error <= _TOLERANCE[model.dtype]:
            raise UnsupportedModelError(
                f"architecture {architecture(model)} cannot be run: over paged attention its "
                f"logits differ from its own by {error:.1e} of the largest (accepted: "
                f"{_TOLERANCE[model.dtype]:.0e})"
            )


def architecture(model: PreTrainedModel) -> str:
    """The name to refuse a model by."""
    return f"{type(model).__name__} (model_type {model.config.model_type!r})"


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the embedding: token ids are below it."""
    return int(cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0])


def paged_logits(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    prompts: list[Tensor],
    first: list[int],
    backend: AttentionBackend,
) -> list[Tensor]:
    """Each prompt's logits ``[tokens, V]`` over paged KV that starts full of NaN.

    Args:
        model: loaded with our attention function.
        layers: what its attention calls store.
        prompts: token ids.
        first: tokens of each prompt in the first of two steps; the rest is the second step.
        backend: computes attention.
    """
    block_size = min_block_size(backend)
    num_blocks = -(-max(len(prompt) for prompt in prompts) // block_size)
    tables = np.arange(2 * num_blocks, dtype=np.int32)[::-1].reshape(2, num_blocks)
    cache = CacheEngine(
        layers,
        num_gpu_blocks=2 * num_blocks,
        num_cpu_blocks=0,
        block_size=block_size,
        dtype=model.dtype,
        device=model.device,
    )
    for pool in cache.gpu_pools:
        pool.fill_(torch.nan)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    steps = [[(0, end) for end in first]]
    steps.append([(end, len(prompt)) for end, prompt in zip(first, prompts, strict=True)])
    step = partial(_paged_step, model, layers, cache, backend, tables=tables, prompts=prompts)
    for spans in steps:
        logits = step(spans=spans)
        sizes = [end - start for start, end in spans]
        for part, piece in zip(parts, logits.split(sizes), strict=True):
            part.append(piece)
    return [torch.cat(part) for part in parts]


def _paged_step(
    model: PreTrainedModel,
    layers: tuple[LayerShape, ...],
    cache: CacheEngine,
    backend: AttentionBackend,
    *,
    tables: np.ndarray[Any, np.dtype[np.int32]],
    prompts: list[Tensor],
    spans: list[tuple[int, int]],
) -> Tensor:
    block_size = cache.block_size
    rows = [row for row, (start, end) in enumerate(spans) if end > start]
    positions = [np.arange(*spans[row]) for row in rows]
    slots = [
        tables[row, position // block_size].astype(np.int64) * block_size + position % block_size
        for row, position in zip(rows, positions, strict=True)
    ]
    layout = BatchLayout(
        query_start=np.cumsum([0, *map(len, positions)]).astype(np.int32),
        seq_lens=np.array([spans[row][1] for row in rows], dtype=np.int32),
        block_tables=tables[rows],
        block_size=block_size,
    )
    metadata = AttentionMetadata(layout, torch.from_numpy(np.concatenate(slots)).to(model.device))
    windows = [layer.window for layer in layers]
    step = PagedAttention(metadata, cache.gpu_pools, windows, write_and_attend(backend))
    tokens = torch.cat([prompts[row][slice(*spans[row])] for row in rows])
    with answering(step):
        return _forward(model, tokens, torch.from_numpy(np.concatenate(positions)))


def _prompt(model: PreTrainedModel, num_tokens: int) -> Tensor:
    """Token ids [num_tokens], spread over the vocabulary."""
    return ((torch.arange(num_tokens) * 7919 + 11) % vocab_size(model)).to(model.device)


@torch.inference_mode()
def _forward(model: PreTrainedModel, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits float32 [T, V] of one flat batch; without positions the model counts its own."""
    arguments = {} if positions is None else {"position_ids": positions[None].to(model.device)}
    output = model(
        input_ids=tokens[None],
        use_cache=False,
        logits_to_keep=torch.arange(len(tokens), device=model.device),
        **arguments,
    )
    return cast(Tensor, output.logits)[0].float()


def _with_window(shape: LayerShape, window: int) -> LayerShape:
    return LayerShape(
        num_kv_heads=shape.num_kv_heads,
        key_size=shape.key_size,
        value_size=shape.value_size,
        window=window,
    )


def _mask_windows(model: PreTrainedModel, masks: MaskReader) -> list[int | None]:
    """The window of each call according to the mask it would have had."""
    recorder = CallRecorder(masks)
    AttentionInterface.register(_PROBE_NAME, paged_attention_forward)
    AttentionMaskInterface.register(_PROBE_NAME, masks)
    with _using_attention(model, _PROBE_NAME), answering(recorder):
        _forward(model, _prompt(model, 2))
    return recorder.mask_windows


@contextmanager
def _using_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention function for a while."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
