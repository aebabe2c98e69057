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
        (("a", 1, "/a", None, 4096), "long_lora_max_len is 4096; it must be None"),
    ],
)
def test_what_cannot_be_is_refused(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        LoRARequest(*given)


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
