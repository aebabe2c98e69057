"""Entries of log-probabilities, as returned to callers."""

import numpy as np
import pytest

from pagedserve.output.logprobs import LogprobsView, TokenLogprob
from pagedserve.outputs import Logprob


@pytest.mark.parametrize("token", [4, 7, 9])
def test_an_entry_has_the_token_itself_first(token: int) -> None:
    ids, values = np.array([7, 4], np.int32), np.array([-0.5, -1.0], np.float32)
    known = {7: Logprob(-0.5, 1, None), 4: Logprob(-1.0, 2, None), 9: Logprob(-3.0, 5, None)}
    chosen = known[token]
    entry = TokenLogprob.of(np.float32(chosen.logprob), np.int32(chosen.rank), ids, values, 2)
    (shown,) = LogprobsView([token], [entry], None)
    assert shown is not None
    assert list(shown) == [token, *(each for each in (7, 4) if each != token)]
    assert shown == {each: known[each] for each in shown}
