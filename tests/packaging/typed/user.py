"""A user's program with every public entry, which `mypy --strict` accepts as it is.

``test_types.py`` runs the functions that need no model.
"""

from collections.abc import Sequence
from typing import Unpack, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

from pagedserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    Calibration,
    ChoiceAnswer,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    ConcurrentCallError,
    ConfigError,
    Decision,
    Diagnostics,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EngineArgs,
    EngineClient,
    EngineDeadError,
    EngineOptions,
    EngineStalledError,
    ExecutorDeadError,
    ExplicitEncoderDecoderPrompt,
    LLMEngine,
    Logprob,
    LoRARequest,
    ModelLoadError,
    NoulAnswer,
    PagedServeError,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    Prompt,
    PromptType,
    Question,
    RequestError,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    ScoreAnswer,
    ScoringOutput,
    ScoringRequestOutput,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    UnsupportedModelError,
    __version__,
)
from pagedserve.scheduler import (
    BlockMoves,
    BlockSpaceManager,
    CacheChoices,
    CacheConfig,
    CachedBlockAllocator,
    GroupStats,
    InputBuffers,
    InvariantError,
    KVGroup,
    LRUEvictor,
    Prefix,
    ScheduledSequenceGroup,
    Scheduler,
    SchedulerChoices,
    SchedulerConfig,
    SchedulerOutputs,
    SequenceGroupMetadata,
    StaleHandleError,
    StepError,
    TokenLookup,
    UncachedBlockAllocator,
)


def version() -> str:
    return __version__


def offline(model: str) -> list[str]:
    llm = LLM(
        model,
        enable_prefix_caching=True,
        swap_space=2,
        seed=None,
        scheduling_policy="priority",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        limit_mm_per_prompt={"image": 2},
    )
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, stop=["\n"], seed=7)
    with llm:
        outputs = llm.generate(["a", "b"], params, priority=[0, 1], use_tqdm=False)
        assert_type(outputs, list[RequestOutput])
        outputs += llm.generate([1, 2, 3], lora_request=LoRARequest("pirate", 1, "adapters/pirate"))
        outputs += llm.generate(
            TextPrompt(prompt="a", cache_salt="b"), [params], trace_headers=None
        )
        outputs += llm.generate([TokensPrompt(prompt_token_ids=[1, 2])])
        outputs += llm.generate([[1, 2], "b", {"prompt": "c", "multi_modal_data": {"image": 3}}])
        prompts: list[Prompt | PromptType] = ["a", [1, 2], {"prompt_token_ids": [4]}]
        outputs += llm.generate(prompts)
        outputs += llm.generate(
            ExplicitEncoderDecoderPrompt(encoder_prompt="a", decoder_prompt=None),
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]+")),
        )
        messages = [{"role": "user", "content": "Name three rivers of Europe."}]
        outputs += llm.chat(messages, params, add_generation_prompt=True)
        beams = llm.beam_search("a", BeamSearchParams(beam_width=3, max_tokens=8))
        assert_type(beams, list[BeamSearchOutput])
        assert_type(llm.reset_prefix_cache(), bool)
        names = [metric.name for metric in llm.get_metrics()]
    sequences = [sequence for output in beams for sequence in output.sequences]
    assert_type(sequences, list[BeamSearchSequence])
    return names + texts_of(outputs) + [sequence.text for sequence in sequences]


def texts_of(outputs: list[RequestOutput]) -> list[str]:
    texts = []
    for output in outputs:
        assert_type(output.metrics, RequestMetrics)
        for completion in output.outputs:
            assert_type(completion, CompletionOutput)
            for position in completion.logprobs or ():
                assert_type(position, dict[int, Logprob])
            texts.append(completion.text)
    return texts


def loaded(model: str, **options: Unpack[EngineOptions]) -> LLM:
    """A function of the user's with the options of an engine."""
    return LLM(model, **options)


def pooled(model: str) -> list[float]:
    options: EngineOptions = {"runner": "pooling", "dtype": torch.float32, "hf_token": True}
    llm = loaded(model, **options)
    (embedding,) = llm.embed("a", pooling_params=PoolingParams(dimensions=64), use_tqdm=False)
    assert_type(embedding, EmbeddingRequestOutput)
    assert_type(embedding.outputs, EmbeddingOutput)
    (classes,) = llm.classify(TextPrompt(prompt="a", text_pair="b"))
    assert_type(classes, ClassificationRequestOutput)
    assert_type(classes.outputs, ClassificationOutput)
    (score,) = llm.score("a", ["b"], use_tqdm=False)
    assert_type(score, ScoringRequestOutput)
    assert_type(score.outputs, ScoringOutput)
    (vector,) = llm.encode("a", PoolingParams(), pooling_task="embed")
    assert_type(vector, PoolingRequestOutput)
    assert_type(vector.outputs, PoolingOutput)
    numbers: list[float] = vector.outputs.data.tolist()
    return [*embedding.outputs.embedding, *classes.outputs.probs, score.outputs.score, *numbers]


def stepped(model: str) -> dict[str, str]:
    engine = LLMEngine(EngineArgs(model, block_size=8, preemption_mode="swap", device=None))
    engine.add_request("a", "The capital of France is", SamplingParams(max_tokens=4))
    texts = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[output.request_id] = output.outputs[0].text
    engine.shutdown()
    return texts


async def streamed(client: EngineClient, prompt: str) -> str:
    """A text from any engine, in this process or elsewhere."""
    text = ""
    params = SamplingParams(max_tokens=32, output_kind=RequestOutputKind.DELTA)
    async for output in client.generate(prompt, params, "a", priority=1):
        assert_type(output, RequestOutput)
        text += output.outputs[0].text
    await client.abort(["a"])
    await client.check_health()
    return text


async def served(model: str) -> str:
    args = AsyncEngineArgs(model, enable_lora=True, max_loras=2, distributed_executor_backend="uni")
    engine = AsyncLLMEngine.from_engine_args(args)
    await engine.add_lora(LoRARequest("pirate", 1, "adapters/pirate"))
    text = await streamed(engine, "a")
    async for output in engine.encode("a", PoolingParams(), "b"):
        assert_type(output, PoolingRequestOutput)
    engine.shutdown()
    return text


def decided(llm: LLM) -> list[float]:
    questions: dict[str, Question] = {
        "urgent": {"type": "noul", "instructions": "Is it urgent?"},
        "team": {"type": "choice", "criteria": {"billing": None, "support": "all else"}},
        "mood": {"type": "score", "criteria": ["bad", "good"]},
    }
    decision = llm.decide({"mail": "Help!"}, questions, calibration=Calibration())
    assert_type(decision, Decision)
    diagnostics = decision.diagnostics["urgent"]
    assert_type(diagnostics, Diagnostics)
    numbers = [diagnostics.label_mass]
    for answer in decision.answers.values():
        match answer:
            case ChoiceAnswer(probabilities=probabilities):
                numbers.append(max(probabilities.values()))
            case NoulAnswer(noul=probability):
                numbers.append(probability)
            case ScoreAnswer(score=level):
                numbers.append(level)
    return numbers


def explained(error: PagedServeError) -> str:
    match error:
        case ExecutorDeadError(rank=rank, step=step):
            return f"rank {rank} died after {step} steps"
        case RequestError(param=str(param)):
            return param
        case EngineDeadError() | EngineStalledError() | ConcurrentCallError():
            return "engine"
        case UnsupportedModelError() | ModelLoadError() | ConfigError():
            return "model"
        case InvariantError():
            return "a bug"
        case _:
            return str(error)


def scheduled(prompts: Sequence[NDArray[np.int32]], num_steps: int) -> list[list[int]]:
    """Token ids of each prompt after some steps of a model that counts."""
    choices = SchedulerChoices(drain_adapters=False)
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=40, policy="fcfs", choices=choices
    )
    cache = CacheConfig(
        block_size=4, num_gpu_blocks=24, choices=CacheChoices(share_partial_blocks=True)
    )
    scheduler = Scheduler(config, cache)
    token_ids, sample_index = np.zeros(64, np.int32), np.zeros(8, np.int32)
    sample_rows, row_handles = np.zeros(8, np.int32), np.zeros(8, np.int64)
    buffers = InputBuffers(
        token_ids=token_ids,
        positions=np.zeros(64, np.int64),
        slot_mapping=np.zeros(64, np.int64),
        query_start=np.zeros(9, np.int32),
        seq_lens=np.zeros(8, np.int32),
        block_tables=np.zeros(80, np.int32),
        sample_index=sample_index,
        sample_rows=sample_rows,
        row_handles=row_handles,
    )
    seqs = [scheduler.add_seq_group(prompt, arrival_time=0.0)[1] for prompt in prompts]
    for now in range(num_steps):
        step = scheduler.schedule(float(now))
        assert_type(step, SchedulerOutputs)
        assert_type(step.scheduled_seq_groups, list[ScheduledSequenceGroup])
        assert_type(scheduler.seq_group_metadata(), list[SequenceGroupMetadata])
        scheduler.prepare_inputs(buffers)
        tokens = token_ids[sample_index[: step.num_samples]] + np.int32(1)
        finish = np.zeros(step.num_samples, np.uint8)
        one_each = np.arange(step.num_samples + 1, dtype=np.int32)
        handles, ended = scheduler.update(
            step.step_id, sample_rows[: step.num_samples], one_each, tokens, finish
        )
        assert_type(handles, NDArray[np.int64])
        assert_type(ended, list[tuple[int, GroupStats]])
    scheduler.check()
    return [scheduler.token_ids(seq).tolist() for seq in seqs]


def managed() -> list[int]:
    """Block numbers from each of the block managers."""
    config = CacheConfig(block_size=4, num_gpu_blocks=8, watermark=0.0)
    space = BlockSpaceManager(config, num_lookahead_slots=1)
    group, seq = space.add_seq_group(np.arange(6, dtype=np.int32), max_num_running_seqs=2)
    if space.can_allocate(group) == "ok":
        space.allocate(group)
    space.append_token(seq, 9)
    blocks: list[int] = space.block_table(seq).tolist()
    assert_type(space.moves, list[BlockMoves])
    space.free(seq)
    try:
        space.fork(seq)
    except StaleHandleError:
        blocks.append(space.num_free_gpu_blocks)

    plain, cached = UncachedBlockAllocator(4), CachedBlockAllocator(4, block_size=2)
    block = cached.allocate()
    assert block is not None
    tokens = np.array([1, 2], np.int32)
    root = Prefix.root(salt=1)
    assert_type(cached.register(block, root, tokens), Prefix)
    evictor = LRUEvictor()
    evictor.add(block, last_access=0, num_hashed_tokens=2)
    found = (plain.allocate(), cached.find(root, tokens), evictor.evict())
    return blocks + [number for number in found if number is not None]


def drafted() -> list[int]:
    lookup = TokenLookup(min_match=2, max_match=8)
    lookup.extend([5, 6, 7, 8, 9, 5, 6])
    return lookup.propose(3)


def windows() -> int:
    config = SchedulerConfig.classic(max_model_len=64, preemption_mode="recompute")
    least = KVGroup.num_gpu_blocks_for(config, window=8, block_size=4)
    return KVGroup("window", window=8, num_gpu_blocks=least).num_gpu_blocks


def out_of_order() -> str:
    cache = CacheConfig.classic(block_size=4, num_gpu_blocks=2)
    scheduler = Scheduler(SchedulerConfig(max_model_len=8), cache)
    try:
        scheduler.abandon(0)
    except StepError as error:
        return explained(error)
    return ""
