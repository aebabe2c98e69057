"""Mistakes of a user, each of which `mypy --strict` reports.

A comment that mypy does not need is an error too, so each of them states that the line is refused.
"""

import numpy as np

import pagedserve
import pagedserve.scheduler
from pagedserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    EngineClient,
    EngineOptions,
    LLMEngine,
    PoolingParams,
    SamplingParams,
)
from pagedserve.scheduler import (
    BlockSpaceManager,
    CacheConfig,
    InputBuffers,
    Scheduler,
    SchedulerConfig,
)


def wrong_options(model: str) -> None:
    LLM(model, max_model_length=512)  # type: ignore[call-arg]
    LLM(model, max_model_len="512")  # type: ignore[arg-type]
    LLM(model, attention_backend="flash")  # type: ignore[arg-type]
    LLM(model, kv_cache_memory=0.5)  # type: ignore[arg-type]
    LLM(model, speculative_config="ngram")  # type: ignore[arg-type]
    LLM(model, "gpt2")  # type: ignore[arg-type, call-arg]
    LLM()  # type: ignore[call-arg]
    EngineArgs(model, preemption_mode="drop")  # type: ignore[arg-type]
    EngineArgs(model, enable_prefix_cache=True)  # type: ignore[call-arg]
    AsyncEngineArgs(model, max_loras=None, max_lora=2)  # type: ignore[call-arg]
    options: EngineOptions = {"attention_backend": "flash"}  # type: ignore[typeddict-item]
    LLM(model, **options)


def wrong_calls(llm: LLM) -> None:
    llm.genrate("a")  # type: ignore[attr-defined]
    llm.generate(1.5)  # type: ignore[arg-type]
    llm.generate([{"promt": "a"}])  # type: ignore[list-item]
    llm.generate("a", SamplingParams(temperature="hot"))  # type: ignore[arg-type]
    llm.generate("a", nonsense=None)  # type: ignore[call-arg]
    llm.generate("a", trace_headers={})  # type: ignore[arg-type]
    llm.generate("a", PoolingParams())  # type: ignore[arg-type]
    llm.chat("Why is the sky blue?")  # type: ignore[arg-type]
    llm.embed("a", pooling_parameters=PoolingParams())  # type: ignore[call-arg]
    llm.classify("a", pooling_params=SamplingParams())  # type: ignore[arg-type]
    llm.score("a", "b", use_tqdm="no")  # type: ignore[arg-type]
    llm.encode("a", pooling_task="rank")  # type: ignore[arg-type]
    PoolingParams(dimensions="64")  # type: ignore[arg-type]


async def wrong_streams(engine: AsyncLLMEngine, client: EngineClient) -> None:
    client = LLMEngine(EngineArgs("smollm2"))  # type: ignore[assignment]
    client.generate("a", SamplingParams())  # type: ignore[call-arg]
    engine.generate("a", {"temperature": 0}, "b")  # type: ignore[arg-type]
    AsyncLLMEngine.from_engine_args("smollm2")  # type: ignore[arg-type]


def wrong_schedules(scheduler: Scheduler) -> None:
    SchedulerConfig(max_model_len=8, policy="lifo")  # type: ignore[arg-type]
    SchedulerConfig(max_num_sequences=8)  # type: ignore[call-arg]
    CacheConfig(block_size="4", num_gpu_blocks=8)  # type: ignore[arg-type]
    InputBuffers(token_ids=np.zeros(8, np.int32))  # type: ignore[call-arg]
    scheduler.add_seq_group([1, 2, 3], arrival_time=0.0)  # type: ignore[arg-type]
    scheduler.schedule()  # type: ignore[call-arg]


def wrong_names(scheduler: Scheduler, space: BlockSpaceManager) -> list[object]:
    return [
        pagedserve.LMM,  # type: ignore[attr-defined]
        pagedserve.scheduler.LLMEngine,  # type: ignore[attr-defined]
        EngineArgs("smollm2").max_model_length,  # type: ignore[attr-defined]
        scheduler.schedule(0.0).num_tokens,  # type: ignore[attr-defined]
        space.can_allocate(0) == "never mind",  # type: ignore[comparison-overlap]
    ]
