"""Where the seconds of a run go, and how many the machine cannot do without.

Measured from outside by wrapping what is called: a stage whose module or method an engine does not
call, because it computes it together with others, has no calls, and its seconds are in the rest.

The least seconds of linear layers and head are the floating-point operations of the load by the
best rate of a large matrix product in this process; those of attention are the bytes of the KV
cache that the load reads, once a token, by the best rate of reading memory.  Both as if
nothing were cached or computed twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from time import perf_counter
from typing import Any, cast
from unittest.mock import patch

import torch
from loads import Request
from measuring import GIB, Clock, Stopwatch
from torch import Tensor, nn

from pagedserve import LLM
from pagedserve._core import Scheduler
from pagedserve.attention.interface import PagedAttention
from pagedserve.cache.layers import KVFormat, kv_bytes_per_block
from pagedserve.executor.local import LocalExecutor
from pagedserve.models.fused.cpu.layers import CpuDecoderLayer
from pagedserve.models.fused.cpu.modules import CpuRMSNorm, PackedGatedMLP, PackedLinear
from pagedserve.sampling.sampler import LaunchedSamples, Sampler

PRODUCT_SIZE = 2048
READ_BYTES = GIB // 2
NUM_TRIALS = 5

# Stages that are modules of the model; fused layers do the others' work in one call.
STAGES: dict[str, tuple[type, ...]] = {
    "decoder layers": (CpuDecoderLayer,),
    "linear layers": (PackedLinear, PackedGatedMLP, nn.Linear),
    "norms": (CpuRMSNorm,),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """The best that this process reached: two ways to multiply matrices, and reading memory."""

    torch_mm_gflops: float
    packed_gflops: float
    read_gb_per_s: float

    @property
    def gflops(self) -> float:
        """The faster of the two products."""
        return max(self.torch_mm_gflops, self.packed_gflops)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a run; ``least_seconds`` is None where nothing says how fast it could be."""

    stage: str
    calls: int | None
    seconds: float
    share: float
    least_seconds: float | None


class TimedScheduler:
    """A scheduler whose calls of a step are timed; the class in Rust takes no wrapped methods."""

    def __init__(self, scheduler: Scheduler, watch: Stopwatch) -> None:
        self._scheduler = scheduler
        self.schedule = watch.wrap(scheduler.schedule)
        self.prepare_inputs = watch.wrap(scheduler.prepare_inputs)
        self.update = watch.wrap(scheduler.update)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def model_of(llm: LLM) -> nn.Module:
    """The model that an engine runs."""
    return cast(nn.Module, executor_of(llm).worker.loaded.model)


def executor_of(llm: LLM) -> LocalExecutor:
    """The executor that runs it, in this process."""
    return cast(LocalExecutor, llm.llm_engine.model_executor)


def head_of(model: nn.Module) -> nn.Module:
    """The layer that makes logits."""
    return cast(nn.Module, cast(Any, model).get_output_embeddings())


def modules_of(model: nn.Module, *kinds: type) -> list[nn.Module]:
    """The modules of some classes, without the head."""
    head = head_of(model)
    return [module for module in model.modules() if type(module) in kinds and module is not head]


@contextmanager
def watching(llm: LLM) -> Iterator[dict[str, Stopwatch]]:
    """Time the calls of an engine by what they are for, while the block runs."""
    engine = llm.llm_engine
    model = model_of(llm)
    wrapped: dict[str, list[tuple[Any, str]]] = {
        "forward": [(model, "forward")],
        "attention": [(PagedAttention, "answer")],
        **{
            stage: [(module, "forward") for module in modules_of(model, *kinds)]
            for stage, kinds in STAGES.items()
        },
        "head": [(head_of(model), "forward")],
        "sampling": [(Sampler, "launch"), (LaunchedSamples, "results")],
    }
    watches = {name: Stopwatch() for name in (*wrapped, "scheduling")}
    scheduler = TimedScheduler(engine.scheduler, watches["scheduling"])
    with ExitStack() as patches:
        loop = engine._loop  # noqa: SLF001  # measured from outside, on purpose
        patches.enter_context(patch.object(loop, "_scheduler", scheduler))
        for name, places in wrapped.items():
            for owner, method in places:
                timed = watches[name].wrap(getattr(owner, method))
                patches.enter_context(patch.object(owner, method, timed))
        yield watches


def profile(
    llm: LLM, requests: Sequence[Request], run: Callable[[], object]
) -> tuple[list[Stage], Rates, Clock]:
    """One run of the requests, split into stages that add up to it."""
    dtype = next(model_of(llm).parameters()).dtype
    before = measure_rates(dtype)
    with watching(llm) as watches, Clock() as clock:
        run()
    after = measure_rates(dtype)
    # The clock drifts within minutes: what was reached on either side was there to be reached.
    rates = Rates(*map(max, astuple(before), astuple(after)))
    least = least_seconds(llm, requests, rates)
    if watches["decoder layers"].calls:
        least["decoder layers"] = least.pop("attention") + least.pop("linear layers")
    taken = {name: watch.seconds for name, watch in watches.items()}
    spent = {name: taken[name] for name in ("attention", *STAGES, "head")}
    spent["rest of the forward"] = taken["forward"] - sum(spent.values())
    spent |= {name: taken[name] for name in ("scheduling", "sampling")}
    spent["rest outside"] = clock.seconds - sum(spent.values())
    spent["all"] = clock.seconds
    stages = [
        Stage(
            stage=name,
            calls=watches[name].calls if name in watches else None,
            seconds=seconds,
            share=seconds / clock.seconds,
            least_seconds=least.get(name),
        )
        for name, seconds in spent.items()
    ]
    return stages, rates, clock


def least_seconds(llm: LLM, requests: Sequence[Request], rates: Rates) -> dict[str, float]:
    """What the arithmetic and the memory of this machine allow, by stage."""
    loaded = executor_of(llm).worker.loaded
    head = head_of(model_of(llm))
    weights = num_weights(model_of(llm))
    lengths = [(len(request["prompt"]), request["out"]) for request in requests]
    # The last token of a request is sampled and not computed.
    num_tokens = sum(prompt + out - 1 for prompt, out in lengths)
    num_sampled = sum(out for _, out in lengths)
    # A prompt reads itself once, and each later token all that are before it and itself.
    num_read = sum(prompt * out + out * (out - 1) // 2 for prompt, out in lengths)
    token_bytes = kv_bytes_per_block(
        loaded.stored_layers, block_size=1, kv_format=KVFormat(loaded.dtype.itemsize)
    )
    return {
        "attention": num_read * token_bytes / (rates.read_gb_per_s * 1e9),
        "linear layers": 2 * (weights - num_weights(head)) * num_tokens / (rates.gflops * 1e9),
        "head": 2 * num_weights(head) * num_sampled / (rates.gflops * 1e9),
    }


def num_weights(model: nn.Module) -> int:
    """Weights of all linear layers in it, packed or not."""
    packed = [weights for module in model.modules() for weights in getattr(module, "packed", ())]
    plain = [module.weight.numel() for module in model.modules() if type(module) is nn.Linear]
    return sum(plain) + sum(int(weights.in_features * weights.out_features) for weights in packed)


@torch.inference_mode()
def measure_rates(dtype: torch.dtype) -> Rates:
    """The best rates that torch reaches with its present number of threads."""
    x = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype)
    packed = PackedLinear(nn.Linear(PRODUCT_SIZE, PRODUCT_SIZE, bias=False, dtype=dtype))
    source = torch.zeros(READ_BYTES // 4)
    giga_operations = 2 * PRODUCT_SIZE**3 / 1e9
    return Rates(
        torch_mm_gflops=giga_operations / best_seconds(lambda: torch.mm(x, x)),
        packed_gflops=giga_operations / best_seconds(lambda: packed(x)),
        read_gb_per_s=READ_BYTES / 1e9 / best_seconds(source.sum),
    )


def best_seconds(call: Callable[[], Tensor]) -> float:
    """The shortest of some calls; the first is not counted."""
    call()
    seconds = []
    for _ in range(NUM_TRIALS):
        started = perf_counter()
        call()
        seconds.append(perf_counter() - started)
    return min(seconds)
