"""``LLM`` with the real model: order, reproducibility, refusals, and nothing left behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import LongT5Config, LongT5ForConditionalGeneration

from pagedserve import (
    LLM,
    BeamSearchParams,
    ConfigError,
    ModelLoadError,
    RequestError,
    SamplingParams,
    TokensPrompt,
    UnsupportedModelError,
)
from pagedserve.executor.protocol import Executor, StepInput
from pagedserve.models.load.sources import resolve_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPTS = ["The capital of France is", "One, two, three, four,", "Water freezes at"]


def check_idle(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.get_num_unfinished_requests() == 0
    assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
    engine.scheduler.check()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "smollm2" in request.fixturenames:
        llm: LLM = request.getfixturevalue("smollm2")
        check_idle(llm)
        outputs = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert outputs[0].outputs[0].text.startswith(" Paris")
        check_idle(llm)


def texts(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[str]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(smollm2: LLM) -> None:
    alone = [texts(smollm2, prompt)[0] for prompt in PROMPTS]
    assert texts(smollm2, PROMPTS) == alone
    # The first ends last.
    params = [SamplingParams(temperature=0, max_tokens=6 - 2 * index) for index in range(3)]
    outputs = smollm2.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 4, 2]


def test_token_ids_and_text_mean_the_same(smollm2: LLM) -> None:
    token_ids = [smollm2.get_tokenizer()(prompt).input_ids for prompt in PROMPTS]
    expected = texts(smollm2, PROMPTS)
    assert texts(smollm2, [{"prompt_token_ids": prompt} for prompt in token_ids]) == expected
    assert texts(smollm2, None, prompt_token_ids=token_ids) == expected
    assert texts(smollm2, None, prompt_token_ids=token_ids[0]) == expected[:1]
    mixed = [PROMPTS[0], {"prompt_token_ids": token_ids[1]}]
    assert texts(smollm2, mixed) == expected[:2]


def test_the_end_of_sequence_token_is_in_the_ids_but_not_in_the_text(smollm2: LLM) -> None:
    tokenizer = smollm2.get_tokenizer()
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say only the word yes."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    params = SamplingParams(temperature=0, max_tokens=100)
    (output,) = smollm2.generate(
        {"prompt_token_ids": cast("list[int]", chat)}, params, use_tqdm=False
    )
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] == tokenizer.eos_token_id
    assert "<|im_end|>" not in completion.text


def test_beams_end_with_the_token_that_ended_them_if_it_is_asked_for(smollm2: LLM) -> None:
    tokenizer = smollm2.get_tokenizer()
    prompt: TokensPrompt = {"prompt_token_ids": tokenizer.encode("<|im_start|>assistant\nYes.")}
    found = {}
    for keeps in (False, True):
        params = BeamSearchParams(beam_width=2, max_tokens=24, include_stop_str_in_output=keeps)
        (output,) = smollm2.beam_search([prompt], params)
        found[keeps] = [beam for beam in output.sequences if beam.finish_reason == "stop"]
    assert found[True]
    for beam, bare in zip(found[True], found[False], strict=True):
        assert beam.tokens == [*bare.tokens, tokenizer.eos_token_id]
        assert beam.text == f"{bare.text}<|im_end|>"


def test_chat_answers_in_the_models_own_template(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = smollm2.chat([question, question], params, use_tqdm=False)
    template = smollm2.get_tokenizer().apply_chat_template(
        question, add_generation_prompt=True, return_dict=False
    )
    assert [output.prompt_token_ids for output in asked] == [template, template]
    assert all("Paris" in output.outputs[0].text for output in asked)


def test_chat_takes_a_template_from_a_file(smollm2: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1)
    template = "{% for message in messages %}{{ message.content }};{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    question = [{"role": "user", "content": "Hello"}]
    for given in (str(tmp_path / "template.jinja"), template):
        (output,) = smollm2.chat(question, params, use_tqdm=False, chat_template=given)
        assert output.prompt == "Hello;"
    with pytest.raises(ConfigError, match=r"chat_template: cannot read .*nothing\.jinja"):
        smollm2.chat(question, params, chat_template=str(tmp_path / "nothing.jinja"))


def test_a_seeded_request_is_the_same_alone_and_among_others(smollm2: LLM) -> None:
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_tokens=24, ignore_eos=True)
    alone = smollm2.generate(PROMPTS[1], seeded, use_tqdm=False)[0].outputs[0].token_ids
    others = [
        SamplingParams(temperature=0.5 + index / 31, seed=index, max_tokens=8 + index)
        for index in range(31)
    ]
    params = [*others[:13], seeded, *others[13:]]
    prompts = [
        PROMPTS[1] if own is seeded else PROMPTS[index % 3] * 2 for index, own in enumerate(params)
    ]
    among = smollm2.generate(prompts, params, use_tqdm=False)[13].outputs[0].token_ids
    assert among == alone


def test_requests_without_a_seed_differ(smollm2: LLM) -> None:
    random = SamplingParams(temperature=1, max_tokens=12)
    assert len(set(texts(smollm2, [PROMPTS[0]] * 4, random))) > 1


def interrupted_once(executor: Executor, error: BaseException, after: int) -> Callable[..., Any]:
    """``launch`` that raises in one step."""
    launch, count = executor.launch, 0

    def failing(step: StepInput) -> Any:
        nonlocal count
        count += 1
        if count == after:
            raise error
        return launch(step)

    return failing


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the model broke")])
@pytest.mark.parametrize("after", [1, 4])
def test_nothing_is_left_after_an_exception_in_the_model(
    smollm2: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int
) -> None:
    with monkeypatch.context() as patch:
        executor = smollm2.llm_engine.model_executor
        patch.setattr(executor, "launch", interrupted_once(executor, error, after))
        with pytest.raises(type(error)):
            texts(smollm2, PROMPTS * 3)
    check_idle(smollm2)
    assert texts(smollm2, PROMPTS[1]) == texts(smollm2, PROMPTS)[1:2]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        (None, {}, "no prompts"),
        ("", {}, "the prompt is empty"),
        (["a", ""], {}, "prompt 1 is empty"),
        ([{"prompt_token_ids": []}], {}, "the prompt is empty"),
        ("a", {"prompt_token_ids": [1]}, "both given"),
        (None, {"prompt_token_ids": [[1], [1.5]]}, r"token 0 of prompt 1 is 1\.5.*integers"),
        (None, {"prompt_token_ids": [-1]}, "token 0 of the prompt is -1.*from 0 to 49151"),
        (None, {"prompt_token_ids": [49152]}, "is 49152.*from 0 to 49151"),
        (None, {"prompt_token_ids": [5] * 8192}, "8192 tokens; max_model_len is 8192"),
        (["a", "b"], {"sampling_params": [SamplingParams()]}, "1 sampling_params for 2 prompts"),
        ("a", {"sampling_params": SamplingParams(stop_token_ids=[49152])}, "stop_token_ids"),
    ],
)
def test_a_bad_request_is_refused_whole(
    smollm2: LLM, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        smollm2.generate(prompts, **options)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_bad_prompt_keeps_all_out(smollm2: LLM, position: int) -> None:
    prompts: list[Any] = list(PROMPTS)
    prompts[position] = {"prompt_token_ids": [10**6]}
    before = smollm2.llm_engine.stats.num_prompt_tokens
    with pytest.raises(RequestError, match=f"of prompt {position} is 1000000"):
        smollm2.generate(prompts, GREEDY)
    assert smollm2.llm_engine.stats.num_prompt_tokens == before


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 2},
    ],
)
def test_bad_parameters_are_refused_before_they_reach_the_engine(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        LLM("./no-such-model")


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        LLM(str(tmp_path))


@pytest.mark.usefixtures("smollm2")  # skips where its weights are not installed
def test_a_gguf_file_cut_short_is_refused(tmp_path: Path) -> None:
    source = resolve_model("smollm2").path
    short = tmp_path / "short.gguf"
    with source.open("rb") as file:
        short.write_bytes(file.read(8 << 20))
    with pytest.raises(ModelLoadError, match=r"short\.gguf"):
        LLM(str(short))


def test_an_architecture_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    config = LongT5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1)
    LongT5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"LongT5.*cannot be run"):
        LLM(str(tmp_path))


def test_fewer_blocks_than_a_prompt_needs(smollm2: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM("smollm2", dtype="float32", num_gpu_blocks=2)
    assert "2 blocks x" in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"33 tokens and needs 3 KV blocks of 16.*has 2"):
        llm.generate({"prompt_token_ids": [5] * 33}, GREEDY)
    assert texts(llm, PROMPTS[0]) == texts(smollm2, PROMPTS[0])
    check_idle(llm)


@pytest.mark.usefixtures("smollm2")
def test_max_model_len_past_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("smollm2", max_model_len=10**6)
