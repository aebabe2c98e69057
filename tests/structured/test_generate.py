"""Texts that must be something: documents of a schema, choices, expressions, grammars.

Documents are judged by ``jsonschema``, which knows nothing of how they came to be.
"""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from pydantic import BaseModel
from transformers import LlamaConfig, LlamaForCausalLM

from pagedserve import LLM, EngineOptions, RequestError, SamplingParams, StructuredOutputsParams
from pagedserve.sampling.grammar_compiler import GrammarCompiler
from tests.support.drafts import NGRAM, drafting
from tests.support.examples import LOOKS_AT_ALL
from tests.support.formula import byte_tokenizer
from tests.support.tiny import save_tiny_llama

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "number", "minimum": 2.5, "maximum": 7},
    {"type": "integer", "multipleOf": 5, "exclusiveMinimum": 10, "maximum": 90},
    {"anyOf": [{"type": "boolean"}, {"const": "maybe"}]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}], "items": False},
    {
        "type": "object",
        "properties": {"id": {"type": "string", "format": "uuid"}, "tags": {"$ref": "#/$defs/t"}},
        "required": ["id", "tags"],
        "additionalProperties": False,
        "$defs": {"t": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    },
]
PROMPT = "A record in JSON:\n"
WAYS_OF_MEMORY: tuple[dict[str, Any], ...] = (
    {"num_gpu_blocks": 400},
    {"num_gpu_blocks": 16, "preemption_mode": "recompute"},
    {"num_gpu_blocks": 16, "preemption_mode": "swap", "swap_space": 0.01},
)
ONE_LINE = {"disable_any_whitespace": True}


def texts(llm: LLM, params: list[SamplingParams], prompt: str = PROMPT) -> list[list[str]]:
    """The texts of the sequences that ended by themselves."""
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    return [
        [sequence.text for sequence in output.outputs if sequence.finish_reason == "stop"]
        for output in outputs
    ]


def of(must_be: Any, **given: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=must_be, **({"max_tokens": 100} | given))


def test_documents_are_those_of_their_schemas(smollm2: LLM) -> None:
    ways: list[tuple[int, dict[str, Any]]] = [
        (len(SCHEMAS), {"temperature": 0}),
        (len(SCHEMAS), {"temperature": 1.5, "seed": 3, "n": 3 if LOOKS_AT_ALL else 1}),
        (
            len(SCHEMAS) if LOOKS_AT_ALL else 2,
            {"temperature": 0.7, "seed": 5, "presence_penalty": 1.0, "logprobs": 1},
        ),
    ]
    asked = [
        (schema, of({"json": schema} | ONE_LINE, **way))
        for num_schemas, way in ways
        for schema in SCHEMAS[:num_schemas]
    ]
    num_sequences, num_ended = sum(params.n for _, params in asked), 0
    for (schema, _), found in zip(asked, texts(smollm2, [p for _, p in asked]), strict=True):
        for text in found:
            jsonschema.validate(
                json.loads(text), schema, format_checker=jsonschema.FormatChecker(["date", "uuid"])
            )
            num_ended += 1
    assert num_ended >= 0.7 * num_sequences
    assert smollm2.llm_engine.scheduler.num_free_gpu_blocks == 2048


def test_beams_write_documents(smollm2: LLM) -> None:
    params = of({"json": PERSON} | ONE_LINE, temperature=0, use_beam_search=True, n=3)
    (found,) = texts(smollm2, [params])
    assert len(set(found)) == 3
    for text in found:
        jsonschema.validate(json.loads(text), PERSON)


def test_a_tokenizer_that_grammars_cannot_read_is_named(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_llama(tmp_path / "model")), num_gpu_blocks=8, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match=r"no vocabulary that grammars can read: .*Fuse"):
        llm.generate([[5]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)
    assert llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_added_tokens_that_the_model_lacks_are_not_generated() -> None:
    tokenizer = byte_tokenizer()  # 256 bytes and <|end|>
    compiler = GrammarCompiler(tokenizer, 256, [5])
    text = "a<|end|>"
    forced = compiler.compile(StructuredOutputsParams(choice=[text])).states(1).forced([])
    compiler.end()
    assert forced == [tokenizer.convert_tokens_to_ids(letter) for letter in text]


def test_a_tokenizer_that_grammars_cannot_read_is_read_once() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), 255, [5])
    for text in ("a", "b"):
        with pytest.raises(RequestError, match="vocab size too small; 255 vs 256"):
            compiler.compile(StructuredOutputsParams(regex=text))
        compiler.vocab_size = 256  # with which it could be read
    compiler.end()


def test_choices_expressions_and_grammars(smollm2: LLM) -> None:
    choices = ["yes", 'no, "never"', "ja\n"]
    grammar = 'start: "SELECT " column ("," column)~0..2\ncolumn: /[a-z]{1,4}/'
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 2.0, "seed": 1, "n": 4}]
    params = [
        params
        for way in ways
        for params in (
            of({"choice": choices}, **way),
            of({"regex": "[A-Z]{3}-[0-9]{4}"}, **way),
            of({"grammar": grammar}, **way),
            of({"json_object": True} | ONE_LINE, **(way | {"n": 1})),
        )
    ]
    for chosen, matched, parsed, objects in zip(*[iter(texts(smollm2, params))] * 4, strict=True):
        assert set(chosen) <= set(choices)
        assert all(re.fullmatch("[A-Z]{3}-[0-9]{4}", text) for text in matched)
        assert all(re.fullmatch("SELECT [a-z]{1,4}(,[a-z]{1,4}){0,2}", text) for text in parsed)
        assert all(isinstance(json.loads(text), dict) for text in objects)
        assert chosen
        assert matched
        assert parsed


def test_neighbours_and_texts_that_may_be_any_are_what_they_were(smollm2: LLM) -> None:
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    random: dict[str, Any] = {"temperature": 0.8, "seed": 2, "max_tokens": 24}
    plain, drawn = SamplingParams(**greedy), SamplingParams(**random)
    wanted = [
        list(output.outputs[0].token_ids)
        for output in smollm2.generate([PROMPT] * 2, [plain, drawn], use_tqdm=False)
    ]
    any_text = {"regex": "(?s:.*)"}
    given = [plain, of(any_text, **greedy), drawn, of(any_text, **random)]
    given.append(of({"json": PERSON}, max_tokens=24))
    outputs = smollm2.generate([PROMPT] * 5, given, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs[:4]]
    assert found == [wanted[0], wanted[0], wanted[1], wanted[1]]


def test_a_grammar_that_gives_out_ends_its_request_alone(smollm2: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=8)
    given = [plain, of({"regex": "[a-z]{20}((a?){50}){50}a{2000}"}, temperature=0), plain]
    first, failed, last = smollm2.generate([PROMPT] * 3, given, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "the grammar cannot continue" in str(failed.outputs[0].stop_reason)
    (alone,) = smollm2.generate([PROMPT], plain, use_tqdm=False)
    assert first.outputs[0].text == last.outputs[0].text == alone.outputs[0].text


def test_every_choice_can_be_made(smollm2: LLM) -> None:
    choices = [f"number {index}" for index in range(3000)] + ["a/b|c (d) [e] ^$ .*+? #&-~ \\n\n"]
    grammar = smollm2.llm_engine.input_processor.grammars.compile(
        StructuredOutputsParams(choice=choices)
    )
    tokenizer = smollm2.get_tokenizer()
    for choice in choices[::500] + choices[-1:]:
        tokens = tokenizer(choice, add_special_tokens=False).input_ids
        for end, token in enumerate([*tokens, tokenizer.eos_token_id]):
            assert grammar.states(1).at(tokens[:end]).admits(token), (choice, end)


def test_a_text_ends_where_it_must(smollm2: LLM) -> None:
    params = of({"choice": ["yes"]}, temperature=0, min_tokens=50, ignore_eos=True)
    (output,) = smollm2.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].text == "yes"
    assert len(output.outputs[0].token_ids) <= 4, "and the token that ends it"
    whole = of({"json": PERSON}, temperature=0, stop=["age"])
    assert "age" not in texts(smollm2, [whole])[0][0]


def test_a_complete_text_ends_though_its_tokens_alone_are_allowed(smollm2: LLM) -> None:
    tokenizer = smollm2.get_tokenizer()
    digits = [*tokenizer("0123456789", add_special_tokens=False).input_ids]
    params = SamplingParams(
        max_tokens=8,
        allowed_token_ids=digits,
        structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"),
    )
    (answer,) = smollm2.generate(PROMPT, params, use_tqdm=False)
    assert answer.outputs[0].finish_reason == "stop"
    assert re.fullmatch("[0-9]{3}", answer.outputs[0].text)


def test_preempted_requests_write_what_they_would_have(
    smollm2: LLM, tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tokenizer: Any = smollm2.get_tokenizer()
    config = LlamaConfig(**(tiny_config | {"vocab_size": len(tokenizer)}))
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    words = {"regex": "[a-z]{9}( [a-z]{1,8}){5}"}
    params = [
        SamplingParams(n=2, seed=seed, max_tokens=60, structured_outputs=words) for seed in range(6)
    ]
    found = []
    for options in WAYS_OF_MEMORY:
        llm = LLM(str(tmp_path), dtype="float32", block_size=4, use_tqdm_on_load=False, **options)
        outputs = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
        found.append([[sequence.text for sequence in output.outputs] for output in outputs])
        assert (llm.llm_engine.scheduler.num_preemptions > 0) == ("preemption_mode" in options)
    assert found[0] == found[1] == found[2]
    assert all(re.fullmatch(words["regex"], text) for texts in found[0] for text in texts)


class Person(BaseModel):
    name: str
    age: int


def test_a_schema_may_be_given_in_several_ways() -> None:
    schema = Person.model_json_schema()
    ways = (schema, json.dumps(schema), Person)
    assert len({StructuredOutputsParams(json=way) for way in ways}) == 1
    params = SamplingParams()
    params.guided_decoding = StructuredOutputsParams(json=Person)
    assert params.structured_outputs == StructuredOutputsParams(json=Person)
    assert params.clone().structured_outputs == params.structured_outputs


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


DEEP = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "foo"}}}}


@pytest.mark.parametrize(
    ("must_be", "refusal"),
    [
        ({"json": DEEP}, r"structured_outputs\.json cannot be used at #/properties/a/items: .*foo"),
        (
            {"json": {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"not": {}}, {}]}}}},
            r"at #/\$defs/x/anyOf/0: .*not",
        ),
        ({"json": "{"}, r"structured_outputs\.json is no JSON: .*column 2"),
        ({"json": 3}, "it must be a JSON schema"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
        ({"regex": "a(("}, r"structured_outputs\.regex cannot be used: .*unclosed group"),
        ({"grammar": "start: foo"}, r"structured_outputs\.grammar cannot be used: .*\"foo\""),
        ({"choice": ["a", 3]}, r"structured_outputs\.choice\[1\] is 3"),
        ({"regex": "a" * 300_000}, "at most 262144"),
        ({"json": nested(400)}, "nested deeper than 120 levels"),
        ({}, "exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "json": {}}, "has json and regex"),
        ({"structural_tag": "{}"}, "structural_tag; it is not supported"),
        ("a", "structured_outputs is 'a'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(smollm2: LLM, must_be: Any, refusal: str) -> None:
    with pytest.raises(RequestError, match=refusal) as refused:
        smollm2.generate("a", SamplingParams(structured_outputs=must_be), use_tqdm=False)
    assert refused.value.param == "structured_outputs"
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("ways", [{"temperature": 0}, {"temperature": 1.0, "seed": 5, "n": 2}])
def test_guesses_change_no_document_and_what_must_come_is_guessed(
    stand_in: Path, ways: dict[str, Any]
) -> None:
    options: EngineOptions = {
        "dtype": "float32",
        "num_gpu_blocks": 400,
        "use_tqdm_on_load": False,
    }
    plain = LLM(str(stand_in), **options)
    with_drafts: EngineOptions = {**options, "speculative_config": NGRAM}
    guessing = drafting(LLM(str(stand_in), **with_drafts))
    bounds = [
        StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        for schema in SCHEMAS
        for _ in range(2)
    ]
    params = [SamplingParams(max_tokens=48, structured_outputs=each, **ways) for each in bounds]
    prompts = [PROMPT, "Data: "] * len(SCHEMAS)
    wanted, found = [llm.generate(prompts, params, use_tqdm=False) for llm in (plain, guessing)]
    for one, other in zip(wanted, found, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
    for output in found[:2]:  # of the first schema, a person
        assert output.metrics is not None
        assert output.metrics.num_accepted_tokens >= 2, "its keys stand in the schema"
