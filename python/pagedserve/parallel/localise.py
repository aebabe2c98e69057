"""A rank's shards as plain modules, with explicit collectives.

transformers loads each rank's shard of the weights and adds hooks to modules, whose parameters are
DTensors.  This reverts the styles of a plan that it supports: a shard becomes a plain torch module,
which may be packed or replaced by a faster one, within a module with the collective
(`pagedserve.parallel.modules`).  Modules of other styles keep their hooks and are computed by
transformers' code.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from pagedserve.parallel.group import RankGroup
from pagedserve.parallel.modules import Gathered, Reduced, VocabEmbedding
from pagedserve.parallel.plan import ShardPlan, starred
from pagedserve.parallel.shards import Shard, keep_peaks, keep_shards

# Styles whose modules need no collective once their parameters are plain.
_LOCAL: Final = ("colwise", "replicated_with_grad_allreduce", "local_params", "replicate")
_SUMMED: Final = ("rowwise", "rowwise_rep", "rowwise_split_input", "moe_tp_experts")
_GATHERED: Final = ("colwise_gather_output", "colwise_rep")


def split_options(plan: ShardPlan) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` with which each rank loads its shard."""
    return {"distributed_config": DistributedConfig(tp_size=plan.size, tp_plan=plan.given or None)}


def localise(
    model: PreTrainedModel, plan: ShardPlan, group: RankGroup, *, keeps_peaks: bool
) -> None:
    """Convert a rank's shards to plain modules, in place.

    Args:
        model: model of transformers.
        plan: its sharding plan.
        group: ranks that share it.
        keeps_peaks: whether to record the largest weights of layers that are split by inputs, so
            that their shards are quantized as the whole layers.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    local, shards = _LocalParameters(), {}
    for name, module in modules.items():
        style = plan.style_of(name)
        if isinstance(module, nn.Linear | nn.Embedding) and "packed" not in str(style):
            shards[name] = _shard(module, group)
        if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
            replacement: nn.Module | None = _embedding(module, local, group)
        elif style in _LOCAL + _SUMMED + _GATHERED:
            replacement = _replacement(module, style, local, group)
        else:
            continue
        if starred(name) in plan.overrides:
            shards[name] = replace(shards[name], outputs=_keep_own_head(module, plan, group))
        if replacement is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(modules[parent] if parent else model, leaf, replacement)
        if keeps_peaks and style in _SUMMED and isinstance(module, nn.Linear):
            keep_peaks(module, group)
    _count_groups(modules, plan)
    keep_shards(model, shards)
    has_hooks = any("forward" in vars(module) for module in model.modules())
    if not has_hooks:
        # They keep the groups of an unused mesh alive.
        model._device_mesh = model._mesh_manager = None  # noqa: SLF001
        group.drop_others()


def _count_groups(modules: Mapping[str, Any], plan: ShardPlan) -> None:
    """Count the heads, or the queries of each KV head, on this rank.

    transformers' attention repeats keys by the number; ours uses the shapes.
    """
    for name, module in modules.items():
        if plan.is_own and plan.style_of(f"{name}.k_proj") == "colwise":
            module.num_heads //= plan.size
        if starred(f"{name}.k_proj") in plan.overrides and hasattr(module, "num_key_value_groups"):
            groups = module.num_key_value_groups
            module.num_key_value_groups = groups * plan.kv_heads // plan.size


class _LocalParameters:
    """Plain parameters that replace DTensors; tied parameters stay tied."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def put_into(self, module: nn.Module) -> None:
        """Remove a module's hook, and convert its direct parameters."""
        module.__dict__.pop("forward", None)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                module._parameters[key] = self._of(parameter)  # noqa: SLF001  # a setter would copy
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape

    def _of(self, parameter: Any) -> nn.Parameter:
        known = self._made.get(id(parameter))
        if known is None:
            made = nn.Parameter(parameter.to_local().contiguous(), requires_grad=False)
            # The DTensor is kept: its address must not be reused.
            known = self._made[id(parameter)] = made, parameter
        return known[0]


def _shard(module: Any, group: RankGroup) -> Shard:
    """Which features of a module this rank has."""
    weight = module.weight
    features = [slice(0, size) for size in weight.shape]
    placements: Any = weight.placements if isinstance(weight, DTensor) else ()
    for placement in placements:
        if placement.is_shard():
            axis = placement.dim % weight.ndim
            count = -(-weight.shape[axis] // group.size)
            ends = (min(rank * count, weight.shape[axis]) for rank in (group.rank, group.rank + 1))
            features[axis] = slice(*ends)
    if isinstance(module, nn.Embedding):
        return Shard(*weight.shape, *features)
    outputs, inputs = features
    return Shard(weight.shape[1], weight.shape[0], inputs, outputs)


def _embedding(
    module: nn.Embedding, local: _LocalParameters, group: RankGroup
) -> VocabEmbedding | None:
    if not isinstance(module.weight, DTensor):
        return None
    local.put_into(module)
    module.padding_idx = None  # only gradients use it, and it may be on another rank
    return VocabEmbedding(module, group)


def _replacement(
    module: Any, style: str, local: _LocalParameters, group: RankGroup
) -> nn.Module | None:
    """Module that replaces one with plain shards; None leaves it."""
    num_inputs = getattr(module, "in_features", 0)
    local.put_into(module)
    if style in _GATHERED:
        return Gathered(module, group)
    if style not in _SUMMED:
        return None
    part = None
    if style == "rowwise_split_input":
        first = group.rank * -(-num_inputs // group.size)
        part = slice(first, first + module.in_features)
    return Reduced(module, group, part)


def _keep_own_head(module: Any, plan: ShardPlan, group: RankGroup) -> slice:
    """Select from a replicated projection the KV head that this rank's queries attend to.

    Returns:
        The features of that head.
    """
    size = module.out_features // plan.kv_heads
    first = group.rank * plan.kv_heads // plan.size * size
    features = slice(first, first + size)
    for key, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(parameter[features].clone(), requires_grad=False))
    module.out_features = size
    return features
