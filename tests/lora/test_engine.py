"""Requests with adapters, end to end: each row of a mixed batch is what peft answers alone."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve import (
    LLM,
    CompletionOutput,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from pagedserve.config.precision import Quantization
from pagedserve.lora.adapter import CONFIG, WEIGHTS
from pagedserve.runner.model_runner import Forward
from pagedserve.runner.padded import PaddedDecode
from tests.support.drafts import NGRAM, Noise, drafting
from tests.support.lora import KINDS, load_adapter, rounded, save_random_adapter
from tests.support.tiny import VOCAB_SIZE

TOLERANCE = 1e-4
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enable_lora": True,
    "max_lora_rank": 64,
    "max_cpu_loras": len(KINDS),
    "block_size": 4,
    "num_gpu_blocks": 512,
}
# Every choice of kernels of the torch backend, and the native one.
BACKENDS: dict[str, dict[str, Any]] = {
    "generic": {"backend": "torch", "cpu_kernels": "generic"},
    "modules": {"backend": "torch", "cpu_kernels": "modules"},
    "fused": {"backend": "torch", "cpu_kernels": "fused"},
    "native": {"backend": "native"},
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=0)


@pytest.fixture(scope="module")
def adapters(base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    directory = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(kind, n, str(save_random_adapter(base, kind, directory / str(n), seed=n)))
        for n, kind in enumerate(KINDS, start=1)
    ]


@pytest.fixture(scope="module")
def oracles(base: PreTrainedModel, adapters: list[LoRARequest]) -> dict[LoRARequest | None, Any]:
    """peft's own model of each adapter, and the base model."""
    return oracles_over(base, adapters)


def oracles_over(
    base: PreTrainedModel, adapters: list[LoRARequest]
) -> dict[LoRARequest | None, Any]:
    return {None: base} | {adapter: load_adapter(base, Path(adapter.path)) for adapter in adapters}


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(tiny: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(str(tiny), backend=request.param, max_loras=8, **OPTIONS)


def prompts_of(num_prompts: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 24, (num_prompts,), generator=generator).tolist()
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def assert_equal(output: RequestOutput, oracle: Any) -> None:
    """Every log-probability of an output, the prompt's and the new ones, is the oracle's."""
    for completion in output.outputs:
        logprobs = logprobs_of(oracle, output, completion)
        assert error(output, completion, logprobs) < TOLERANCE
        for place, token in enumerate(completion.token_ids, len(output.prompt_token_ids) - 1):
            assert logprobs[place].max() - logprobs[place, token] < TOLERANCE


@torch.no_grad()
def logprobs_of(oracle: Any, output: RequestOutput, completion: CompletionOutput) -> Tensor:
    """Of every token that may follow each token but the last, float64 ``[T - 1, V]``."""
    tokens = torch.tensor([*output.prompt_token_ids, *completion.token_ids])
    logprobs: Tensor = oracle(tokens[None, :-1]).logits[0].double().log_softmax(-1)
    return logprobs


def error(output: RequestOutput, completion: CompletionOutput, logprobs: Tensor) -> float:
    """How far the log-probabilities of an output, all that it has, are from these."""
    own = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
    assert own
    return max(
        abs(known.logprob - float(logprobs[place, token]))
        for place, entries in enumerate(own, start=len(logprobs) - len(own))
        for token, known in (entries or {}).items()
    )


def mixed(adapters: list[LoRARequest], num_rows: int) -> list[LoRARequest | None]:
    """Each adapter and the base model in turn."""
    choices = [None, *adapters]
    return [choices[row * 5 % len(choices)] for row in range(num_rows)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_of_a_mixed_batch_is_what_peft_answers_alone(
    tiny: Path,
    backend: str,
    adapters: list[LoRARequest],
    oracles: dict[LoRARequest | None, Any],
) -> None:
    llm = LLM(str(tiny), max_loras=8, **OPTIONS | BACKENDS[backend])
    wanted = mixed(adapters, 64)
    outputs = llm.generate(prompts_of(64), PARAMS, lora_request=wanted, use_tqdm=False)
    for output, adapter in zip(outputs, wanted, strict=True):
        assert output.lora_request is adapter
        assert output.outputs[0].lora_request is adapter
        assert_equal(output, oracles[adapter])


@pytest.mark.parametrize("backend", ["modules", "fused", "native"])
def test_with_int8_weights_each_row_is_what_peft_makes_of_those(
    tiny: Path, backend: str, base: PreTrainedModel, adapters: list[LoRARequest]
) -> None:
    """The numbers that the bytes stand for, multiplied in float32: as near as without int8."""
    more = BACKENDS[backend] | {"quantization": "int8"}
    llm = LLM(str(tiny), max_loras=8, **OPTIONS | more)
    oracles = oracles_over(rounded(base, torch.float32, "int8"), adapters)
    wanted = mixed(adapters, 64)
    outputs = llm.generate(prompts_of(64), PARAMS, lora_request=wanted, use_tqdm=False)
    for output, adapter in zip(outputs, wanted, strict=True):
        assert_equal(output, oracles[adapter])


@pytest.mark.parametrize(
    ("backend", "quantization"),
    [
        ("generic", None),
        ("modules", None),
        ("modules", "int8"),
        ("fused", None),
        ("fused", "int8"),
        ("native", None),
        ("native", "int8"),
    ],
)
def test_in_bfloat16_each_row_is_as_near_to_float64_as_peft_alone(
    tiny: Path,
    backend: str,
    quantization: Quantization | None,
    base: PreTrainedModel,
    adapters: list[LoRARequest],
) -> None:
    """Activations are rounded to 8 bits between layers, by peft's own model too, in other places:
    what that is off from the same weights in float64 is the measure."""
    more = BACKENDS[backend] | {"quantization": quantization, "dtype": "bfloat16"}
    llm = LLM(str(tiny), max_loras=8, **OPTIONS | more)
    held = rounded(base, torch.bfloat16, quantization)
    in_bfloat16 = oracles_over(held, adapters)
    exact = oracles_over(copy.deepcopy(held).double(), adapters)
    wanted = mixed(adapters, 64)
    ours: dict[LoRARequest | None, float] = dict.fromkeys(wanted, 0.0)
    theirs = ours.copy()
    outputs = llm.generate(prompts_of(64), PARAMS, lora_request=wanted, use_tqdm=False)
    for output, adapter in zip(outputs, wanted, strict=True):
        (completion,) = output.outputs
        expected = logprobs_of(exact[adapter], output, completion)
        ours[adapter] = max(ours[adapter], error(output, completion, expected))
        noise = (logprobs_of(in_bfloat16[adapter], output, completion) - expected).abs().max()
        theirs[adapter] = max(theirs[adapter], float(noise))
    assert all(ours[adapter] <= 2 * theirs[adapter] for adapter in ours), (ours, theirs)


# What attention leaves of rows that pad is what was in memory; nothing reads what comes of it.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("is_padded", [False, True])
def test_kernels_of_a_gpu_give_each_row_what_peft_answers_alone(
    tiny: Path,
    device: torch.device,
    adapters: list[LoRARequest],
    oracles: dict[LoRARequest | None, Any],
    *,
    is_padded: bool,
) -> None:
    """Padded, decode steps are those that a CUDA graph would record."""
    more = {"attention_backend": "triton", "device": device.type, "enforce_eager": True}
    more |= {"block_size": 16, "num_gpu_blocks": 16, "max_num_seqs": 4, "max_model_len": 24}
    llm = LLM(str(tiny), max_loras=3, **OPTIONS | more)
    executor: Any = llm.llm_engine.model_executor
    if is_padded:
        forward = Forward(executor.worker.loaded, executor.worker.cache)
        padded = PaddedDecode(forward, executor.buffers, sizes=(4,), block_size=16)
        executor.worker.runner._padded = padded
    kinds = ("patterns", "embeddings and head")
    wanted = [*(adapters[list(KINDS).index(kind)] for kind in kinds), None]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    prompts = [[5, 6, 7, 8], [11, 12], [9, 8, 7]]
    outputs = llm.generate(prompts, params, lora_request=wanted, use_tqdm=False)
    for output, adapter in zip(outputs, wanted, strict=True):
        assert_equal(output, oracles[adapter])


def test_an_adapter_shows(llm: LLM, adapters: list[LoRARequest]) -> None:
    """Else nothing here would show anything."""
    prompt = prompts_of(1)[0]
    outputs = llm.generate([prompt] * 9, PARAMS, lora_request=[None, *adapters], use_tqdm=False)
    assert len({str(output.outputs[0].cumulative_logprob) for output in outputs}) == 9


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 12},
        {"num_gpu_blocks": 40, "preemption_mode": "swap"},
        {"num_gpu_blocks": 40, "preemption_mode": "recompute"},
        {"async_scheduling": True},
        {"enable_prefix_caching": True, "max_num_seqs": 6},
        {"speculative_config": NGRAM},
    ],
    ids=lambda more: ", ".join(more) or "plain",
)
def test_more_adapters_than_slots_take_turns(
    tiny: Path,
    backend: Any,
    adapters: list[LoRARequest],
    oracles: dict[LoRARequest | None, Any],
    more: dict[str, Any],
) -> None:
    """Loaded, evicted and loaded again, whatever happens to their requests meanwhile."""
    llm = LLM(str(tiny), backend=backend, max_loras=2, **OPTIONS | {"max_cpu_loras": 2} | more)
    if "speculative_config" in more:
        drafting(llm, Noise({}, 0))
    wanted = mixed(adapters, 24)
    outputs = llm.generate(prompts_of(24), PARAMS, lora_request=wanted, use_tqdm=False)
    for output, adapter in zip(outputs, wanted, strict=True):
        assert_equal(output, oracles[adapter])
    if "preemption_mode" in more:
        assert llm.llm_engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", range(3))
def test_samples_and_beams_have_the_adapter_of_their_request(
    llm: LLM, adapters: list[LoRARequest], oracles: dict[LoRARequest | None, Any], seed: int
) -> None:
    sampled = SamplingParams(n=4, seed=seed, temperature=1.0, max_tokens=5, logprobs=2)
    beams = SamplingParams(
        n=3, best_of=3, use_beam_search=True, temperature=0, max_tokens=5, logprobs=2
    )
    wanted = [*adapters, None]
    params = [sampled if row % 2 else beams for row in range(len(wanted))]
    prompts = prompts_of(len(wanted), seed)
    for output in llm.generate(prompts, params, lora_request=wanted, use_tqdm=False):
        oracle = oracles[output.lora_request]
        for completion in output.outputs:
            tokens = torch.tensor([*output.prompt_token_ids, *completion.token_ids])
            with torch.no_grad():
                logprobs = oracle(tokens[None]).logits[0].log_softmax(-1)
            own = range(len(output.prompt_token_ids), len(tokens))
            total = sum(float(logprobs[place - 1, tokens[place]]) for place in own)
            assert completion.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)


def test_no_prefix_is_shared_across_adapters_or_changed_files(
    tiny: Path, base: PreTrainedModel, tmp_path: Path
) -> None:
    llm = LLM(str(tiny), max_loras=2, enable_prefix_caching=True, **OPTIONS)
    path = tmp_path / "adapter"
    for name in ("first", "second"):
        save_random_adapter(base, "query and value", tmp_path / name, seed=len(name))
    shutil.copytree(tmp_path / "first", path)
    adapter = LoRARequest("a", 1, str(path))
    same = LoRARequest("b", 2, str(tmp_path / "first"))
    prompt = prompts_of(1, seed=3)[0] * 2
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)

    def ask(wanted: LoRARequest | None) -> tuple[int, RequestOutput]:
        (output,) = llm.generate([prompt], params, lora_request=wanted, use_tqdm=False)
        return output.num_cached_tokens or 0, output

    first = load_adapter(base, path)
    for wanted, oracle, is_cached in (
        (None, base, False),
        (adapter, first, False),
        (adapter, first, True),
        (same, first, True),
        (None, base, True),
    ):
        cached, output = ask(wanted)
        assert (cached > 0) is is_cached
        assert_equal(output, oracle)
    shutil.copy(tmp_path / "second" / WEIGHTS, path / WEIGHTS)
    cached, output = ask(adapter)
    assert cached == 0
    assert_equal(output, load_adapter(base, path))


def test_an_adapter_that_is_refused_touches_nobody(
    llm: LLM, adapters: list[LoRARequest], oracles: dict[LoRARequest | None, Any], tmp_path: Path
) -> None:
    engine = llm.llm_engine
    prompts = prompts_of(2)
    engine.add_request("good", prompts[0], PARAMS, lora_request=adapters[0])
    bad = {
        "is no directory with": LoRARequest("nowhere", 90, str(tmp_path)),
        "lora_int_id is 1 of": LoRARequest("other", 1, adapters[1].path),
    }
    for said, adapter in bad.items():
        with pytest.raises(RequestError, match=said):
            engine.add_request("bad", prompts[1], PARAMS, lora_request=adapter)
    with pytest.raises(RequestError, match="lora_request is 'x'; it must be a LoRARequest"):
        engine.add_request("bad", prompts[1], PARAMS, lora_request="x")  # type: ignore[arg-type]
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
    assert_equal(outputs[-1], oracles[adapters[0]])


def test_a_number_can_be_given_to_another_adapter(
    llm: LLM, base: PreTrainedModel, adapters: list[LoRARequest]
) -> None:
    engine, (first, second) = llm.llm_engine, adapters[:2]
    assert engine.add_lora(LoRARequest("a", 70, first.path))
    assert 70 in engine.list_loras()
    again = LoRARequest("a", 70, second.path)
    with pytest.raises(RequestError, match="lora_int_id is 70 of"):
        engine.add_lora(again)
    assert engine.remove_lora(70)
    assert not engine.remove_lora(70)
    (output,) = llm.generate([prompts_of(1)[0]], PARAMS, lora_request=again, use_tqdm=False)
    assert_equal(output, load_adapter(base, Path(second.path)))
    inplace = LoRARequest("a", 70, first.path, load_inplace=True)
    (output,) = llm.generate([prompts_of(1)[0]], PARAMS, lora_request=inplace, use_tqdm=False)
    assert_equal(output, load_adapter(base, Path(first.path)))


def test_without_enable_lora_an_adapter_is_refused(tiny: Path, adapters: list[LoRARequest]) -> None:
    llm = LLM(str(tiny), num_gpu_blocks=64)
    with pytest.raises(RequestError, match="takes adapters with enable_lora=True alone"):
        llm.generate("w1", lora_request=adapters[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank_pattern": {"(": 4}}, "no regular expression"),
        ({"lora_alpha": 10**400}, "lora_alpha is"),
    ],
)
def test_an_adapter_that_fails_leaves_the_engine_serving(
    llm: LLM, adapters: list[LoRARequest], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    (prompt,) = prompts_of(1)
    expected = llm.generate([prompt], PARAMS, lora_request=adapters[0])[0].outputs[0].token_ids
    broken = shutil.copytree(adapters[0].path, tmp_path / "broken")
    config = json.loads((broken / CONFIG).read_text())
    (broken / CONFIG).write_text(json.dumps(config | change))
    for path in (str(broken), "/" + "a/" * 2000, "~nobody-of-that-name/x"):
        with pytest.raises(RequestError, match=f"{said}|is no directory|is unknown"):
            llm.generate([prompt], PARAMS, lora_request=LoRARequest("broken", 99, path))
    after = llm.generate([prompt], PARAMS, lora_request=adapters[0])[0].outputs[0].token_ids
    assert after == expected
