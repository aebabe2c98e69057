"""What must come, as clients ask for it: which field says it, and what a refusal names."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedserve import LLMEngine, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.errors import RequestError
from pagedserve.sampling_params.structured_outputs import (
    MAX_CHARS,
    MAX_CHOICES,
    StructuredOutputsParams,
)
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.http.bounds import check_bounds
from pagedserve.server.http.errors import scrubbed
from pagedserve.server.options import ServerArgs
from pagedserve.server.params import completion_params
from tests.server.conftest import Served

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NONSENSE = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a/b": {"type": 5}}}}}


@pytest.fixture(scope="module")
def tiny(
    real_tokenizer: "PreTrainedTokenizerBase",
    tiny_config: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """A server of a tiny model that has the vocabulary of a real one."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(**(tiny_config | {"vocab_size": len(real_tokenizer)}))
    LlamaForCausalLM(config).save_pretrained(directory)
    real_tokenizer.save_pretrained(directory)
    args = EngineArgs(str(directory), dtype="float32", num_gpu_blocks=200, use_tqdm_on_load=False)
    options = ServerArgs(port=0, uvicorn_log_level="warning")
    with Served(partial(LLMEngine, args), options) as running:
        yield running
        running.wait_until_idle()


def bound(**fields: Any) -> Any:
    body = CompletionBody.model_validate({"prompt": "a", **fields})
    return completion_params(body, SamplingParams()).structured_outputs


def test_a_constraint_may_be_given_in_both_spellings() -> None:
    choice = bound(guided_choice=["yes", "no"])
    assert (
        bound(structured_outputs={"choice": ["yes", "no"]}, guided_choice=["yes", "no"]) == choice
    )
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert bound(guided_json=schema, response_format=wanted) == bound(guided_json=schema)
    with pytest.raises(RequestError, match="structured_outputs and guided_choice are given and"):
        bound(structured_outputs={"choice": ["yes"]}, guided_choice=["yes", "no"])
    with pytest.raises(RequestError, match="guided_regex and response_format are given and differ"):
        bound(guided_regex="a", response_format={"type": "json_object"})
    assert bound(guided_json={}).json == bound(guided_json="true").json == "{}"
    assert bound(guided_json_object=False) is None


def test_a_json_object_may_have_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    given = {"type": "json_object", "schema": schema}
    assert bound(response_format=given) == bound(guided_json=schema)


def test_strict_schemas_are_closed() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    for strict in (True, False, None):
        given = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
        wanted = bound(response_format=given, guided_json=schema)
        assert wanted.disable_additional_properties == bool(strict)
        assert wanted.json == bound(guided_json=schema).json
        body = CompletionBody.model_validate({"prompt": "a", "response_format": given})
        found = completion_params(body, SamplingParams(), closes=False).structured_outputs
        assert found == bound(guided_json=schema)


@pytest.mark.parametrize(
    ("body", "refusal", "param"),
    [
        ({"guided_choice": []}, "guided_choice has no texts; it must have", "guided_choice"),
        ({"guided_regex": ""}, "guided_regex is ''; it must be a non-empty", "guided_regex"),
        ({"guided_grammar": ""}, "guided_grammar is ''; it must be", "guided_grammar"),
        ({"guided_json": ""}, "guided_json is ''; it must be", "guided_json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice has no texts", None),
        ({"guided_choice": ["a", ""]}, "guided_choice[1] is ''", "guided_choice"),
        ({"guided_regex": "(("}, "guided_regex cannot be used: ", "guided_regex"),
        (
            {"response_format": NONSENSE},
            "response_format cannot be used at #/properties/a~1b: type must be",
            "response_format",
        ),
        (
            {"guided_json": {"items": {"const": 2**53}}},
            "guided_json cannot be used at #/items/const: 9007199254740992 cannot be kept exactly",
            "guided_json",
        ),
        (
            {"guided_json": {"type": "integer", "minimum": -1e19, "maximum": -1e19}},
            "cannot be kept exactly",
            "guided_json",
        ),
        ({"guided_regex": "((a?){50}){50}a{2000}"}, "guided_regex cannot be used", "guided_regex"),
        (
            {"guided_choice": ["yes"], "allowed_token_ids": [5, 6]},
            "allowed_token_ids has none of the tokens that a text of guided_choice may begin with",
            "allowed_token_ids",
        ),
    ],
)
def test_refusals_name_the_field_that_was_sent(
    tiny: Served, body: dict[str, Any], refusal: str, param: str | None
) -> None:
    answer = tiny.complete(prompt="a", max_tokens=4, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert refusal in error["message"]
    assert error["param"] == param or param is None


def test_a_grammar_that_gives_out_is_the_callers_fault(tiny: Served) -> None:
    tokenizer = tiny.engine.tokenizer
    (yes,) = tokenizer("yes", add_special_tokens=False).input_ids
    plain = tiny.complete(prompt="a", max_tokens=4).json()["choices"]
    body = {"guided_choice": ["yes, sir"], "allowed_token_ids": [yes]}
    answer = tiny.complete(prompt="a", max_tokens=9, **body)
    assert answer.status_code == 400
    assert "no token is left to sample" in answer.json()["error"]["message"]
    late = tiny.complete(prompt="a", max_tokens=40, guided_regex="[ab]{9}((a?){50}){50}a{2000}")
    assert late.status_code == 400
    assert "the grammar cannot continue" in late.json()["error"]["message"]
    assert tiny.complete(prompt="a", max_tokens=4).json()["choices"] == plain


def test_any_json_is_json(tiny: Served) -> None:
    answer = tiny.complete(prompt="a", max_tokens=2, guided_json={}, temperature=1.0, seed=1)
    (choice,) = answer.json()["choices"]
    assert choice["text"].lstrip()[:1] in {*'{["tfn-0123456789', ""}


def test_pointers_are_shown_and_paths_are_not() -> None:
    shown = "x cannot be used at #/properties/a/items/0: no /etc/passwd, 0x7fffdeadbeef"
    assert scrubbed(shown) == "x cannot be used at #/properties/a/items/0: no ..., ..."
    assert scrubbed("at #: /a/b/c") == "at #: ..."


@pytest.mark.parametrize(
    ("name", "most", "more", "refusal"),
    [
        (
            "choice",
            ["a"] * MAX_CHOICES,
            ["a"] * (MAX_CHOICES + 1),
            f"has {MAX_CHOICES + 1} choices",
        ),
        ("choice", ["a" * MAX_CHARS], ["a" * (MAX_CHARS + 1)], f"has {MAX_CHARS + 1} characters"),
        ("regex", "a" * MAX_CHARS, "a" * (MAX_CHARS + 1), f"has {MAX_CHARS + 1} characters"),
        ("grammar", "a" * MAX_CHARS, "a" * (MAX_CHARS + 1), f"has {MAX_CHARS + 1} characters"),
    ],
    ids=["choices", "choice", "regex", "grammar"],
)
def test_the_server_takes_as_much_as_the_engine(
    name: str, most: Any, more: Any, refusal: str
) -> None:
    StructuredOutputsParams(**{name: most})
    check_bounds({"structured_outputs": {name: most}, f"guided_{name}": most}, {})
    for body in ({"structured_outputs": {name: more}}, {f"guided_{name}": more}):
        with pytest.raises(RequestError, match=refusal):
            check_bounds(body, {})
