"""Probe: finds the attention of a model by running it on a few tokens when it is loaded.

A model that computes part of its attention outside of our function would silently generate wrong
tokens.  So a model is refused unless

1. its layers keep only keys and values of a sequence, or states that are kept by a module that
   supports flat batches (`pagedserve.models.mixers`);
2. every layer that attends makes attention calls, all of them equally many;
3. its logits over paged KV equal those of its original attention, both unchanged and with windows,
   chunks and other thresholds lowered until a few dozen tokens exceed them
   (`models.check.numerics`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.backends import choose_backend
from pagedserve.attention.interface import AttentionCall, number_layers
from pagedserve.cache.layers import LayerShape
from pagedserve.cache.states import LayerStates
from pagedserve.config.precision import CpuKernels, Quantization
from pagedserve.errors import PagedServeError, UnsupportedModelError
from pagedserve.inputs.images import TEXT_ALONE
from pagedserve.models.attention_function import paged_attention_forward
from pagedserve.models.check.masks import MaskReader
from pagedserve.models.check.numerics import (
    NumericsCheck,
    computing_in_float32,
    lowered_thresholds,
    make_check,
    prompt_of,
    using_attention,
    vocab_size,
)
from pagedserve.models.check.paged_logits import flat_logits
from pagedserve.models.families.table import family_of
from pagedserve.models.forward import ForwardContext, forwarding
from pagedserve.models.load.files import architecture_of, first_line
from pagedserve.models.load.quantized import is_quantized
from pagedserve.models.mixers import mixing_modules
from pagedserve.models.states import StateRecorder

_PROBE_NAME = "pagedserve_probe"
# Types of transformers' cache with only keys and values; one for the keys of another layer.
_KEYS_AND_VALUES: Final = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
# Contents of other types, by a part of their class name.
_STATES: Final = {
    "LinearAttention": "a recurrent or convolution state",
    "Indexed": "an index for sparse attention",
}
# Types with states that mixers write, alone and beside keys and values.
_OF_MIXERS: Final = ("LinearAttentionLayer",)
_OF_BOTH: Final = (
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
# Types of layers that keep nothing.
_NOTHING: Final = ("moe", "mlp")
# Maximum size of models of half precision that are checked in float32, too.
_MOST_BYTES_IN_FLOAT32: Final = 2 * 10**9
# Maximum difference of the logits of int8 weights, as a fraction of the largest logit.
QUANTIZED_TOLERANCE: Final = 0.25


class CallRecorder:
    """Serves attention calls with zeros and records them, without the tensors."""

    def __init__(self, masks: MaskReader | None = None) -> None:
        """Start empty; `masks` has the masks of a probe forward pass."""
        self._masks = masks
        self.modules: list[nn.Module] = []
        self.layers: list[LayerShape] = []
        self.mask_windows: list[int | None] = []
        self.has_window: list[bool] = []

    def answer(self, call: AttentionCall) -> Tensor:
        """Record the call."""
        self.modules.append(call.module)
        self.layers.append(
            LayerShape(
                num_kv_heads=call.key.shape[1],
                key_size=call.key.shape[-1],
                value_size=call.value.shape[-1],
                window=call.options.window,
                is_cross=call.key.shape[2] != call.query.shape[2],
                chunk=call.chunk,
            )
        )
        self.has_window.append(call.has_window)
        if self._masks is not None:
            names_chunk = call.chunk is not None
            self.mask_windows.append(self._masks.window_of(call.mask, names_chunk=names_chunk))
        _, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_zeros(num_tokens, num_heads, call.value.shape[-1])

    def number(self, model: PreTrainedModel) -> tuple[str, ...]:
        """Number the layers of the modules that made the calls; returns the name of each.

        Raises:
            UnsupportedModelError: a module is not part of the model.
        """
        names = {module: name for name, module in model.named_modules()}
        for module in self.modules:
            if module not in names:
                raise UnsupportedModelError(
                    f"architecture {architecture_of(model.config)} cannot be run: "
                    f"{type(module).__name__}, which attends, is not one of its modules"
                )
        found = tuple(names[module] for module in self.modules)
        number_layers(model, found)
        return found


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of the probe.

    Attributes:
        layers: KV shape of each attention call, in the order of the calls.
        modules: name of the module that makes each of them.
        max_exact_len: maximum length for which these layers describe the model's attention.
        selects_logits: see `pagedserve.models.forward.flat_batch_logits`.
        vocab_size: rows of the embedding.
        kernels: the fastest kernels that passed the numerics check in the model.
        states: state shapes of each module with states, in the model's order.
        image_token: placeholder of an image in a text; None if prompts may not have images.
        image_refusal: reason why they may not.
    """

    layers: tuple[LayerShape, ...]
    modules: tuple[str, ...]
    max_exact_len: int
    selects_logits: bool
    vocab_size: int
    kernels: CpuKernels = "generic"
    states: LayerStates = ()
    image_token: str | None = None
    image_refusal: str = TEXT_ALONE


@dataclass(frozen=True, slots=True)
class Probe:
    """A model that passed.

    Attributes:
        result: result of the probe.
        numerics: check to repeat after its modules are replaced.
    """

    result: ProbeResult
    numerics: NumericsCheck


def probe_model(model: PreTrainedModel, *, max_model_len: int, backend: AttentionBackend) -> Probe:
    """Find the attention of a model's layers, and check that paged attention computes it.

    Args:
        model: as transformers built it, with our attention function.
        max_model_len: number of positions over which the masks are read.
        backend: attention backend.

    Raises:
        UnsupportedModelError: a layer keeps more than keys and values, a layer does not use our
            attention function, or paged attention gives other logits.
    """
    with refusing_failures(model):
        result = find_layers(model, max_model_len=max_model_len)
        make_checks = partial(_make_checks, model, result, max_model_len)
        checks = make_checks(backend, model.dtype)
        for check in checks:
            check.run(model)
        if _is_small_and_coarse(model):
            float32_backend = choose_backend(None, model.device, torch.float32)
            with computing_in_float32(model):
                for check in make_checks(float32_backend, torch.float32):
                    check.run(model)
    return Probe(result, checks[-1])


def check_replaced(model: PreTrainedModel, probe: Probe, quantization: Quantization | None) -> None:
    """Repeat the most demanding check for a model whose modules were replaced.

    Args:
        model: model with replaced modules.
        probe: probe of the model with its original modules.
        quantization: quantization of those modules; its error was checked module by module, so only
            gross errors are detected here.

    Raises:
        UnsupportedModelError: it does not pass.
    """
    bound = None if quantization is None else QUANTIZED_TOLERANCE
    with refusing_failures(model):
        probe.numerics.run(model, bound)


@contextmanager
def refusing_failures(model: PreTrainedModel) -> Iterator[None]:
    """Convert any exception of a model on a flat batch to a refusal of the model."""
    try:
        yield
    except PagedServeError:
        raise
    except Exception as error:
        own = _own_failure(model)
        reason = (
            f"a forward pass over paged attention failed with {type(error).__name__}: {error}"
            if own is None
            else f"with its own attention it fails, too, in {str(model.dtype)[6:]} on "
            f"{model.device.type}: {type(own).__name__}: {first_line(own)}"
        )
        if is_quantized(model):
            reason += "; its weights are quantized: try the dtype that they were made for"
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: {reason}"
        ) from error


@torch.inference_mode()
def _own_failure(model: PreTrainedModel) -> Exception | None:
    """Exception of a model on two tokens with its original attention, if any."""
    try:
        with using_attention(model, "eager"):
            model(input_ids=prompt_of(model, 2)[None], use_cache=False)
    except Exception as error:  # noqa: BLE001  # models raise many types
        return error
    return None


def find_layers(model: PreTrainedModel, *, max_model_len: int) -> ProbeResult:
    """Run the model on a few tokens, find its layers and number them.

    Raises:
        UnsupportedModelError: a layer keeps unsupported contents, or does not use our attention
            function.
    """
    num_attending = _count_attending(model)
    recorder, states = CallRecorder(), StateRecorder(len(mixing_modules(model)), model.device)
    with forwarding(ForwardContext(attention=recorder, states=states)):
        selects_logits = _selects_logits(model)
    num_calls = len(recorder.layers)
    is_whole = num_calls > 0 and num_calls % num_attending == 0 if num_attending else not num_calls
    if not is_whole:
        who = f"{num_calls} of" if num_calls else "none of"
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: {who} its "
            f"{num_attending} layers attend through transformers' attention interface, the others "
            "in custom code, whose keys and values cannot be paged; accepted are "
            "decoder-only models whose every layer that attends does so through the interface"
        )
    masks = MaskReader(max_model_len)
    windows = _mask_windows(model, masks)
    layers = (
        shape if named or window is None else replace(shape, window=window)
        for shape, named, window in zip(recorder.layers, recorder.has_window, windows, strict=True)
    )
    return ProbeResult(
        tuple(layers),
        recorder.number(model),
        masks.max_exact_len,
        selects_logits,
        vocab_size(model),
        states=states.layers,
    )


def _count_attending(model: PreTrainedModel) -> int:
    """Count the layers that attend, in a model whose layers keep only supported contents.

    Logits alone would not show: a state that is lost after a few tokens may be hidden by rounding.

    Raises:
        UnsupportedModelError: a layer keeps more than keys and values, and no known module keeps
            it.
    """
    text_config = model.config.get_text_config()
    if not hasattr(text_config, "num_hidden_layers"):
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: its config has no "
            "num_hidden_layers; accepted are models with one stack of layers"
        )
    kinds = [type(layer).__name__ for layer in DynamicCache(config=model.config).layers]
    types = getattr(text_config, "layer_types", None) or kinds
    mixing = Counter(module.layer_idx for module in mixing_modules(model))
    unknown = {
        layer_type
        for index, (kind, layer_type) in enumerate(zip(kinds, types, strict=True))
        if kind not in _KEYS_AND_VALUES
        and not (kind in (*_OF_MIXERS, *_OF_BOTH) and mixing[index] == 1)
    }
    is_recurrent = getattr(model, "_is_stateful", False) and not mixing
    if unknown or is_recurrent:
        _refuse_states(model, unknown, set(kinds), is_recurrent=is_recurrent)
    num_without = sum(
        kind in _OF_MIXERS or layer_type in _NOTHING
        for kind, layer_type in zip(kinds, types, strict=True)
    )
    num_layers: int = text_config.num_hidden_layers
    return num_layers - num_without


def _refuse_states(
    model: PreTrainedModel, unknown: set[str], kinds: set[str], *, is_recurrent: bool
) -> NoReturn:
    held = kinds - set(_KEYS_AND_VALUES)
    kept = {word for part, word in _STATES.items() if any(part in kind for kind in held)}
    if named := family_of(model.config.get_text_config().model_type).keeps:
        kept.add(named)
    states = " and ".join(sorted(kept)) or ("a recurrent state" if is_recurrent else "other states")
    which = f" in layers of type {', '.join(map(repr, sorted(unknown)))}" if unknown else ""
    raise UnsupportedModelError(
        f"architecture {architecture_of(model.config)} cannot be run: it keeps {states} of a "
        f"sequence{which}, which is not supported yet; accepted are full, sliding and chunked "
        "attention, and states that a module writes into transformers' cache"
    )


def _make_checks(
    model: PreTrainedModel,
    result: ProbeResult,
    max_model_len: int,
    backend: AttentionBackend,
    dtype: torch.dtype,
) -> tuple[NumericsCheck, ...]:
    """Checks of the unchanged model, and with its thresholds lowered if it has any."""
    make = partial(
        make_check, model, backend=backend, dtype=dtype, selects_logits=result.selects_logits
    )
    states = result.states
    if states and dtype != model.dtype:  # a state's dtype may follow the weights'
        states = find_layers(model, max_model_len=max_model_len).states
    check = make(result.layers, min(max_model_len, result.max_exact_len), states=states)
    with lowered_thresholds(model, backend) as has_any:
        if not has_any:
            return (check,)
        lowered = find_layers(model, max_model_len=max_model_len)
        max_len = min(max_model_len, lowered.max_exact_len)
        return (check, make(lowered.layers, max_len, states=states, is_lowered=True))


def _is_small_and_coarse(model: PreTrainedModel) -> bool:
    """Whether rounding in half precision may hide an error, and float32 is cheap."""
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    is_coarse = model.dtype != torch.float32
    return is_coarse and not is_quantized(model) and num_bytes <= _MOST_BYTES_IN_FLOAT32


def _selects_logits(model: PreTrainedModel) -> bool:
    """Whether a model called for one token's logits computes only those, or all.

    Raises:
        UnsupportedModelError: it gives another number.
    """
    tokens = prompt_of(model, 2)
    first = torch.zeros(1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        output: Any = model(input_ids=tokens[None], use_cache=False, logits_to_keep=first)
    num_rows = output.logits.shape[1]
    if num_rows not in (1, 2):
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: of two tokens it gives "
            f"{num_rows} rows of logits; accepted are models that give one for each token, or for "
            "each that is requested"
        )
    return bool(num_rows == 1)


def _mask_windows(model: PreTrainedModel, masks: MaskReader) -> list[int | None]:
    """The window of each call according to the mask it would have had."""
    recorder = CallRecorder(masks)
    AttentionInterface.register(_PROBE_NAME, paged_attention_forward)
    AttentionMaskInterface.register(_PROBE_NAME, masks)
    with using_attention(model, _PROBE_NAME):
        flat_logits(
            model,
            prompt_of(model, 2),
            ForwardContext(attention=recorder),
            index=torch.zeros(1, dtype=torch.long),
            selects_logits=True,
        )
    return recorder.mask_windows
