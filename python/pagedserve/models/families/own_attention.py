"""Attention of families whose modules do not use transformers' attention interface.

A method of each attention module is replaced: the one that takes queries, keys and values if the
class has one, else the whole forward.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.errors import UnsupportedModelError
from pagedserve.models.attention_function import ATTENTION_NAME, paged_attention_forward
from pagedserve.models.families.alibi import alibi_slopes
from pagedserve.models.families.record import AttentionCode

Arguments = dict[str, Any]


def replace_attention(model: PreTrainedModel, code: AttentionCode) -> None:
    """Make a model's attention modules use our attention function.

    Args:
        model: Model with its original modules.
        code: Computation of its family.

    Raises:
        UnsupportedModelError: Its config requires something that transformers does not compute.
    """
    computation = _COMPUTATIONS[code]
    for module, method in _attention_methods(model):
        _replace(model, module, method, computation.forward)
    if computation.prepare is not None:
        computation.prepare(model)
    # transformers searches the source of the class for a call of the interface, and finds none.
    cast(Any, model)._can_set_attn_implementation = lambda: True  # noqa: SLF001  # the only way
    model.set_attn_implementation(ATTENTION_NAME)


def is_eager(model: PreTrainedModel) -> bool:
    """Whether the model uses its original attention at the moment."""
    return bool(model.config._attn_implementation == "eager")  # noqa: SLF001  # no public name


def _attention_methods(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """The attention modules of a model, with the name of the method to replace."""
    modules = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    inner = [module for module in modules if hasattr(module, "_attn")]
    return [(module, "_attn" if inner else "forward") for module in inner or modules]


def _replace(
    model: PreTrainedModel, module: Any, method: str, forward: Callable[..., object]
) -> None:
    original = getattr(module, method)

    def attend(*args: Any, **kwargs: Any) -> object:
        if is_eager(model):
            return original(*args, **kwargs)
        return forward(module, *args, **kwargs)

    setattr(module, method, attend)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any
) -> Tensor:
    """Attention of queries, keys and values ``[1, heads, T, size]``: ``[1, T, H * Dv]``."""
    output = paged_attention_forward(module, query, key, value, scaling=scale, **options)[0]
    return output.flatten(2)


def _split(projected: Tensor, num_heads: int) -> Tensor:
    """Reshape ``[1, T, heads * D]`` to ``[1, heads, T, D]``."""
    heads: Tensor = projected.unflatten(-1, (num_heads, -1))
    return heads.transpose(1, 2)


def _split_groups(
    projected: Tensor, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values, which it has in this order per KV head."""
    heads = projected.unflatten(-1, (num_kv_heads, -1, head_dim))
    query, key, value = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _attend_within(
    module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Attention in a method that gives heads ``[1, H, T, Dv]``."""
    return paged_attention_forward(module, query, key, value, **options)[0].transpose(1, 2)


def _gptj(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, None]:
    # Queries and keys are float32 after rotation by a float32 table.
    return _attend_within(module, query.to(value.dtype), key.to(value.dtype), value), None


def _gpt_neo(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else None
    return _attend_within(module, query, key, value, scaling=1.0, sliding_window=window), None


def _openai(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object) -> list[Tensor]:
    """Keys are ``[1, H, D, T]``."""
    return [_attend_within(module, query, key.transpose(2, 3), value)]


def _bloom(
    module: Any, hidden_states: Tensor, residual: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    query, key, value = _split_groups(
        module.query_key_value(hidden_states), module.num_heads, module.head_dim
    )
    slopes = alibi_slopes(module.num_heads, query.device)
    output = _attend(module, query, key, value, module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(output) + residual, None


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    *_: object,
    position_ids: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **__: object,
) -> tuple[Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, key, value = _split_groups(
        module.query_key_value(hidden_states), module.num_kv_heads, module.head_dim
    )
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        query, key = _with_rounded_alibi(query, key, position_ids)
    return module.dense(_attend(module, query, key, value, module.inv_norm_factor)), None


def _with_rounded_alibi(query: Tensor, key: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Falcon rounds biases to bfloat16, so no slopes equal them: they become a feature of keys."""
    num_heads = query.shape[1]
    slopes = alibi_slopes(num_heads, query.device).bfloat16()
    biases = (slopes[:, None] * position_ids).to(key.dtype)[None, ..., None]
    ones = torch.ones_like(biases)
    return torch.cat((query, ones), dim=-1), torch.cat((key, biases), dim=-1)


def _prepare_falcon(model: PreTrainedModel) -> None:
    """Biases are in the mask too, and the eager attention, unlike others, would add them twice."""

    def add_once(_: object, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        if is_eager(model) and kwargs["alibi"] is not None:
            kwargs = kwargs | {"alibi": torch.zeros_like(kwargs["alibi"])}
        return args, kwargs

    for module, _ in _attention_methods(model):
        module.register_forward_pre_hook(add_once, with_kwargs=True)


def _mpt(module: Any, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    projected = module.Wqkv(hidden_states)
    if module.clip_qkv:
        projected = projected.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (_split(part, module.n_heads) for part in projected.chunk(3, dim=-1))
    slopes = alibi_slopes(module.n_heads, query.device, module.alibi_bias_max)
    output = _attend(module, query, key, value, module.softmax_scale, alibi_slopes=slopes)
    return module.out_proj(output), None


def _prepare_mpt(model: Any) -> None:
    """Set biases by the config, which transformers does not read, and no mask."""
    options = model.config.attn_config
    if not options.alibi:
        raise UnsupportedModelError(
            "architecture MptForCausalLM (model_type 'mpt') cannot be run with attn_config.alibi "
            "false: transformers has no other positions for it; accepted is true"
        )
    make_biases = model.transformer.build_mpt_alibi_tensor

    def biases(num_heads: int, length: int, device: torch.device) -> Tensor | None:
        if not is_eager(model):
            return None
        made: Tensor = make_biases(num_heads, length, options.alibi_bias_max, device)
        return made

    def give_mask(_: object, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        # A 4D mask is used unchanged, and a mask is required.
        mask = None if is_eager(model) else torch.zeros(1, 1, 1, 1)
        return args, kwargs | {"attention_mask": mask}

    model.transformer.build_mpt_alibi_tensor = biases
    model.transformer.register_forward_pre_hook(give_mask, with_kwargs=True)
    for block in model.transformer.blocks:
        block.attn.alibi_bias_max = options.alibi_bias_max


def _xglm(module: Any, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    query, key, value = (
        _split(projection(hidden_states), module.num_heads)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    return module.out_proj(_attend(module, query, key, value, module.scaling)), None


class _Computation(NamedTuple):
    """Replacement of a method, called with the module and its arguments; changes to the model."""

    forward: Callable[..., object]
    prepare: Callable[[PreTrainedModel], None] | None = None


_COMPUTATIONS: Final[dict[AttentionCode, _Computation]] = {
    "bloom": _Computation(_bloom),
    "falcon": _Computation(_falcon, _prepare_falcon),
    "gpt_neo": _Computation(_gpt_neo),
    "gptj": _Computation(_gptj),
    "mpt": _Computation(_mpt, _prepare_mpt),
    "openai": _Computation(_openai),
    "xglm": _Computation(_xglm),
}
