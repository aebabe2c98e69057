"""Stop strings that are special tokens, which texts show or not."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedserve import SamplingParams
from pagedserve.inputs import TokensPrompt

LETTERS = [72, 73, 74]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "ways", [{"temperature": 0}, {"use_beam_search": True, "best_of": 2, "temperature": 0}]
)
def test_a_stop_string_that_is_a_special_token_stops_whether_shown_or_not(
    formula: Any, ways: dict[str, Any], *, skip: bool
) -> None:
    def process(token_ids: list[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -math.inf)
        forced[[*LETTERS, formula.eos][len(token_ids) % 4]] = 0
        return forced

    params = SamplingParams(
        **ways,
        max_tokens=20,
        ignore_eos=True,
        stop="<|end|>",
        skip_special_tokens=skip,
        logits_processors=[process],
    )
    ids: TokensPrompt = {"prompt_token_ids": [1]}
    engine = formula.engine()
    engine.add_request("a", ids, params)
    (output,) = formula.finish(engine)["a"].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", "<|end|>")
    assert output.token_ids == [*LETTERS, formula.eos]
    assert len(output.text) == len(LETTERS)
