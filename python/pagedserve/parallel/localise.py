"""A rank's shards as plain modules, with exchanges of our own where the ranks' results meet.

transformers reads each rank its part of the weights and puts hooks around modules, whose
parameters are DTensors.  What this module knows of a plan's styles it undoes: a shard becomes a
module of torch like any other, which may be packed or replaced by a faster one, within a module
that exchanges (`pagedserve.parallel.modules`).  Whatever has another style keeps its hook, and is
computed by transformers' code.
"""

from typing import Any, Final

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from pagedserve.parallel.group import RankGroup
from pagedserve.parallel.modules import Gathered, Reduced, VocabEmbedding
from pagedserve.parallel.plan import ShardPlan, starred

# Styles whose modules need no exchange once their parameters are plain.
_LOCAL: Final = ("colwise", "replicated_with_grad_allreduce", "local_params", "replicate")
_SUMMED: Final = ("rowwise", "rowwise_rep", "rowwise_split_input", "moe_tp_experts")
_GATHERED: Final = ("colwise_gather_output", "colwise_rep")


def split_options(plan: ShardPlan) -> dict[str, Any]:
    """What ``from_pretrained`` is told, so that each rank reads its part."""
    return {
        "distributed_config": DistributedConfig(tp_size=plan.size, tp_plan=plan.overrides or None)
    }


def localise(model: PreTrainedModel, plan: ShardPlan, group: RankGroup) -> None:
    """Make plain modules of a rank's shards, in place."""
    modules: dict[str, Any] = dict(model.named_modules())
    local = _LocalParameters()
    for name, module in modules.items():
        style = plan.style_of(name)
        if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
            replacement: nn.Module | None = _embedding(module, local, group)
        elif style in _LOCAL + _SUMMED + _GATHERED:
            replacement = _replacement(module, style, local, group)
        else:
            continue
        if starred(name) in plan.overrides:
            _keep_own_head(module, plan, group)
        if replacement is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(modules[parent] if parent else model, leaf, replacement)
    for module in modules.values():
        # transformers' own attention repeats keys by it; ours looks at the shapes.
        if hasattr(module, "num_key_value_groups") and hasattr(module, "k_proj"):
            module.num_key_value_groups = module.q_proj.out_features // module.k_proj.out_features
    has_hooks = any("forward" in vars(module) for module in model.modules())
    if not has_hooks:
        # They hold the groups of a mesh that nothing needs any more.
        model._device_mesh = model._mesh_manager = None  # noqa: SLF001
        group.drop_others()


class _LocalParameters:
    """Plain parameters in the place of DTensors; one that is tied to another stays so."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def put_into(self, module: nn.Module) -> None:
        """Take a module's hook away, and make its own parameters plain."""
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
            # The DTensor is kept: another could get its address.
            known = self._made[id(parameter)] = made, parameter
        return known[0]


def _embedding(
    module: nn.Embedding, local: _LocalParameters, group: RankGroup
) -> VocabEmbedding | None:
    if not isinstance(module.weight, DTensor):
        return None
    local.put_into(module)
    module.padding_idx = None  # only gradients ask for it, and it may be another rank's
    return VocabEmbedding(module, group)


def _replacement(
    module: Any, style: str, local: _LocalParameters, group: RankGroup
) -> nn.Module | None:
    """What takes the place of a module whose shards are made plain; None leaves it there."""
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


def _keep_own_head(module: Any, plan: ShardPlan, group: RankGroup) -> None:
    """Of a projection that every rank has whole, the KV head that this rank's queries see."""
    size = module.out_features // plan.kv_heads
    first = group.rank * plan.kv_heads // plan.size * size
    for key, parameter in list(module.named_parameters(recurse=False)):
        own = parameter[first : first + size].clone()
        setattr(module, key, nn.Parameter(own, requires_grad=False))
    module.out_features = size
