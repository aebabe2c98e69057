"""``LoRARequest`` takes what vLLM's versions take, and refuses what cannot be."""

from pathlib import Path
from typing import Any

import pytest

from pagedserve import LoRARequest, RequestError
from pagedserve.lora.request import match_lora_requests


def test_both_of_vllms_spellings_are_taken() -> None:
    new = LoRARequest("sql", 1, "/adapters/sql")
    assert (new.name, new.adapter_id, new.path) == ("sql", 1, "/adapters/sql")
    assert LoRARequest("sql", 1, lora_local_path="/adapters/sql") == new
    assert LoRARequest(lora_name="sql", lora_int_id=1, lora_path=Path("/adapters/sql")) == new  # type: ignore[arg-type]
    assert len({new, LoRARequest("sql", 1, "/adapters/sql"), LoRARequest("sql", 2, "/a")}) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("", 1, "/a"), "lora_name is ''; it must be a non-empty string"),
        (("a", 0, "/a"), "lora_int_id is 0; it must be an integer, at least 1"),
        (("a", True, "/a"), "lora_int_id is True"),
        (("a", 1), "lora_path is None; it must be a non-empty string"),
        (("../../x", 1, "/a"), "lora_name is '../../x'; it must be a name without .. between"),
        (("a\\..\\x", 1, "/a"), "lora_name is .* a name without .. between slashes"),
        (("a\nb", 1, "/a"), r"lora_name is 'a\\nb'; it must be 1 to 256 printable characters"),
        (("a\0", 1, "/a"), "lora_name is .* printable"),
        (("a\u202eb", 1, "/a"), "lora_name is .* printable"),
        (("a" * 257, 1, "/a"), r"lora_name is 'a{40}\.\.\. \(257 characters\)'; .* 1 to 256"),
        ((["a"], 1, "/a"), "lora_name is .*; it must be a non-empty string"),
        (("a", 1, "/a\0b"), "lora_path is .* at most 4096 characters without NUL"),
        (("a", 1, "/" + "a" * 5000), r"lora_path is .*\(5001 characters\)'; .* at most 4096"),
        (("a", 1, "/a", None, None, "b\n"), "base_model_name is .* printable characters"),
        (("a", 1, "/a", None, None, 5), "base_model_name is 5; it must be a non-empty string"),
        (("a", 1, "/a", None, 4096), "long_lora_max_len is 4096; it must be None"),
    ],
)
def test_what_cannot_be_is_refused(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        LoRARequest(*given)


@pytest.mark.parametrize("name", ["a" * 256, "owner/name", "v1..2", "Übersetzer 2 (de)", "/a/b"])
def test_names_up_to_the_bound_are_taken(name: str) -> None:
    assert LoRARequest(name, 1, "/a").name == name


def test_one_is_for_all_prompts_or_there_is_one_each() -> None:
    a, b = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")
    assert match_lora_requests(None, 2) == [None, None]
    assert match_lora_requests(a, 2) == [a, a]
    assert match_lora_requests([a, None, b], 3) == [a, None, b]
    with pytest.raises(RequestError, match="2 in lora_request for 3 prompts"):
        match_lora_requests([a, b], 3)
    with pytest.raises(RequestError, match=r"lora_request\[1\] is 'b'; it must be a LoRARequest"):
        match_lora_requests([a, "b"], 2)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="lora_request is 'a'; it must be one LoRARequest"):
        match_lora_requests("a", 1)  # type: ignore[arg-type]
