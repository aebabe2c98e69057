"""Batches of rows with different adapters against peft, each row alone and unmerged."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.config.precision import CpuKernels, Quantization
from pagedserve.errors import StepError
from pagedserve.lora.apply import AdapterModules
from pagedserve.models.adapters import AdapterRows
from pagedserve.models.loader import load_model
from tests.support.adapters import MixedBatch, PeftOracle, save_random_model
from tests.support.lora import rounded

ALL_LINEAR = {"target_modules": "all-linear"}
QV = {"target_modules": ["q_proj", "v_proj"]}
# Ranks 4 to 64, other names, patterns, both scales.
CONFIGS: list[dict[str, Any]] = [
    {"r": 16, **ALL_LINEAR},
    {"r": 4, "lora_alpha": 2, **QV},
    {"r": 64, "use_rslora": True, **ALL_LINEAR},
    {"r": 8, "target_modules": ["down_proj", "k_proj"], "lora_alpha": 32},
    {"r": 5, "rank_pattern": {"gate_proj": 33}, "alpha_pattern": {"up_proj": 1}, **ALL_LINEAR},
    {"r": 16, "target_modules": ["embed_tokens", "o_proj"]},
    {"r": 7, "target_modules": ["lm_head", "up_proj"]},
    {"r": 32, "target_modules": ["gate_proj"], "layers_to_transform": [1]},
]
NUM_ROWS = 64


@pytest.fixture
def oracle(tmp_path: Path, tiny_config: dict[str, Any]) -> Callable[..., tuple[Path, PeftOracle]]:
    """Saves a tiny model, and the same with adapters of peft."""

    def make(
        configs: list[dict[str, Any]], edit: Callable[[Any], Any] | None = None, **options: Any
    ) -> tuple[Path, PeftOracle]:
        directory = save_random_model(tmp_path / "model", tiny_config | options)
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        if edit is not None:
            model = edit(model)
        return directory, PeftOracle(model, [LoraConfig(**config) for config in configs])

    return make


def sequences(seed: int, num_rows: int = NUM_ROWS) -> list[Tensor]:
    """So many of 2 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 13, (num_rows,), generator=generator).tolist()
    return [torch.randint(97, (length,), generator=generator) for length in lengths]


def assert_rows_equal_peft(
    directory: Path, oracle: PeftOracle, num: int, num_rows: int = NUM_ROWS, **options: Any
) -> None:
    """Rows of all adapters and of none, mixed, in a prefill and in a decode step."""
    loaded = load_model(EngineArgs(model=str(directory), dtype="float32", **options))
    modules = AdapterModules(loaded, num_slots=num, max_rank=64)
    # Adapter n in another slot than n.
    for index in range(num):
        modules.load((index + 1) % num, oracle.weights(index))
    adapters = [None if row % (num + 1) == num else row % (num + 1) for row in range(num_rows)]
    slots = [-1 if adapter is None else (adapter + 1) % num for adapter in adapters]
    tokens = sequences(3, num_rows)
    batch = MixedBatch(loaded, modules, tokens, slots)
    prompts, last = batch.prompt_logits(), batch.last_logits()
    for row, (sequence, adapter) in enumerate(zip(tokens, adapters, strict=True)):
        exact = oracle.logits(sequence, adapter).log_softmax(-1)
        found = prompts[row].cpu().log_softmax(-1)
        assert float((found - exact[:-1]).abs().max()) < 1e-4, (row, adapter)
        if row % 2 == 0:
            decoded = last[row // 2].cpu().log_softmax(-1)
            assert float((decoded - exact[-1]).abs().max()) < 1e-4, (row, adapter)


@pytest.mark.parametrize("cpu_kernels", ["generic", "modules", "fused"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_of_eight_adapters_equal_peft_alone(
    oracle: Any, family: str, cpu_kernels: CpuKernels
) -> None:
    directory, peft = oracle(CONFIGS, model_type=family, head_dim=16, intermediate_size=96)
    assert_rows_equal_peft(directory, peft, len(CONFIGS), cpu_kernels=cpu_kernels)


def test_layers_of_a_gpu_equal_peft(oracle: Any, device: torch.device) -> None:
    configs = [CONFIGS[index] for index in (0, 4, 5, 6)]  # each kind of module
    directory, peft = oracle(configs)
    how = {"attention_backend": "triton", "device": device.type, "max_model_len": 24}
    assert_rows_equal_peft(directory, peft, len(configs), num_rows=5, **how)


def test_layers_of_gpt2_equal_peft(oracle: Any) -> None:
    targets = {"target_modules": ["c_attn", "c_proj", "c_fc", "wte"], "fan_in_fan_out": True}
    directory, peft = oracle([{"r": 4, **targets}, {"r": 24, **targets}], model_type="gpt2")
    assert_rows_equal_peft(directory, peft, 2)


@pytest.mark.parametrize("cpu_kernels", ["modules", "fused"])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, "int8"),
        (torch.float32, "int8"),
    ],
)
def test_rounded_models_are_no_further_from_float64_than_peft(
    oracle: Any, dtype: torch.dtype, quantization: Quantization | None, cpu_kernels: CpuKernels
) -> None:
    edit = partial(rounded, dtype=dtype, quantization=quantization)
    directory, peft = oracle(CONFIGS, edit, intermediate_size=96)
    in_float64 = deepcopy(peft)
    in_float64.model.double()
    args = EngineArgs(
        model=str(directory),
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        quantization=quantization,
        cpu_kernels=cpu_kernels,
    )
    loaded = load_model(args)
    modules = AdapterModules(loaded, num_slots=len(CONFIGS), max_rank=64)
    for slot in range(len(CONFIGS)):
        modules.load(slot, peft.weights(slot))
    slots = [row % (len(CONFIGS) + 1) - 1 for row in range(NUM_ROWS)]
    tokens = sequences(3)
    ours: dict[int, float] = dict.fromkeys(slots, 0.0)
    theirs = ours.copy()
    prompts = MixedBatch(loaded, modules, tokens, slots).prompt_logits()
    for sequence, slot, found in zip(tokens, slots, prompts, strict=True):
        adapter = None if slot < 0 else slot
        exact = in_float64.logits(sequence, adapter)
        ours[slot] = max(ours[slot], float((found - exact[:-1]).abs().max()))
        error = (peft.logits(sequence, adapter) - exact).abs().max()
        theirs[slot] = max(theirs[slot], float(error))
    # The largest of few errors; the order of torch's sums depends on the processor.
    assert all(ours[slot] <= 3 * theirs[slot] for slot in ours), (ours, theirs)


def generic(directory: Path, **options: Any) -> tuple[Any, AdapterModules]:
    args = EngineArgs(model=str(directory), dtype="float32", cpu_kernels="generic", **options)
    loaded = load_model(args)
    return loaded, AdapterModules(loaded, num_slots=2, max_rank=8)


def test_a_slot_holds_what_was_loaded_last(oracle: Any) -> None:
    directory, peft = oracle([{"r": 4, **ALL_LINEAR}, {"r": 8, **QV}])
    loaded, modules = generic(directory)
    tokens = sequences(5)

    def logits(slot: int) -> Tensor:
        batch = MixedBatch(loaded, modules, tokens, [slot] * len(tokens))
        return torch.cat(batch.prompt_logits())

    base = logits(-1)
    assert logits(1).equal(base)  # nothing was loaded
    modules.load(1, peft.weights(0))
    first = logits(1)
    modules.load(1, peft.weights(1))
    modules.load(0, peft.weights(0))
    assert logits(0).equal(first)
    second = logits(1)
    assert not second.equal(first)
    modules.load(0, peft.weights(1))
    assert logits(0).equal(second)
    modules.load(1, {})
    assert logits(1).equal(base)


def test_targets_are_named_as_transformers_names_them(oracle: Any) -> None:
    directory, peft = oracle([{"r": 4, **ALL_LINEAR}])
    _, modules = generic(directory)
    shapes = {name: (pair.a.shape[1], pair.b.shape[0]) for name, pair in peft.weights(0).items()}
    assert modules.targets == shapes | {"model.embed_tokens": (97, 32), "lm_head": (32, 97)}


@pytest.mark.parametrize("slot", [2, -1])
def test_what_fits_no_slot_is_refused(oracle: Any, slot: int) -> None:
    directory, _ = oracle([{"r": 4, **QV}])
    _, modules = generic(directory)
    with pytest.raises(StepError, match=f"slot must be below 2; got {slot}"):
        modules.load(slot, {})


def test_a_slot_that_does_not_exist_is_refused_in_a_step(oracle: Any) -> None:
    directory, _ = oracle([{"r": 4, **QV}])
    _, modules = generic(directory)
    rows = AdapterRows(np.array([0, 2, -1], dtype=np.int32), torch.device("cpu"))
    with pytest.raises(StepError, match="slots must be below 2; got 2"):
        modules.of_step(rows)
