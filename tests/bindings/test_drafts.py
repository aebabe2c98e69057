"""Drafts and their lookup at the border: what Python hands over and gets back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedserve import ConfigError, StepError, TokenLookup

MakeEngine = Callable[..., Any]


def int32(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)


def test_a_drafted_row_has_more_tokens_and_samples(make_engine: MakeEngine) -> None:
    engine = make_engine({"num_lookahead_slots": 3})
    _, seq = engine.add(6)
    engine.step(50)
    outputs = engine.schedule()
    drafted = engine.scheduler.propose(outputs.step_id, int32(0), int32(0, 2), int32(51, 52))
    assert (drafted.num_batched_tokens, drafted.num_samples, drafted.num_drafts) == (3, 3, 2)
    (row,) = engine.inputs(drafted)
    assert (row.positions, row.token_ids, row.num_keys) == ([6, 7, 8], [50, 51, 52], 9)
    engine.update(drafted, [(0, [51, 99], False)])
    assert engine.scheduler.token_ids(seq).tolist()[6:] == [50, 51, 99]
    (row,) = engine.inputs(engine.schedule())
    assert (row.positions, row.token_ids) == ([8], [99])


def test_drafts_that_do_not_fit_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine({"num_lookahead_slots": 3})
    engine.add(6)
    engine.step(50)
    step_id = engine.schedule().step_id
    for drafts, said in (
        ((int32(1), int32(0, 1), int32(5)), "rows names 1"),
        ((int32(0), int32(0, 4), int32(1, 2, 3, 4)), "it may have 3"),
        ((int32(0), int32(0), int32(5)), "token_start must have 2 entries"),
        ((int32(), int32(), int32()), "token_start must have 1 entries"),
        ((np.zeros(1), int32(0, 1), int32(5)), "rows"),
    ):
        with pytest.raises((StepError, TypeError), match=said):
            engine.scheduler.propose(step_id, *drafts)
    with pytest.raises(StepError, match="cannot be ended"):
        engine.scheduler.propose(step_id + 1, int32(0), int32(0, 1), int32(5))
    assert engine.scheduler.propose(step_id, int32(0), int32(0, 1), int32(5)).num_drafts == 1


def test_a_lookup_keeps_texts_apart() -> None:
    lookup = TokenLookup(min_match=2, max_match=4)
    lookup.extend([1, 2, 3, 4])
    lookup.end_text()
    lookup.extend([7, 8, 7, 8])
    assert len(lookup) == 9
    assert lookup.propose(3) == [7, 8, 7]
    assert lookup.propose_for([9, 1, 2], 9) == [3, 4]
    assert lookup.propose_for([4, 7], 9) == []
    with pytest.raises(ConfigError, match="min_match is -1"):
        TokenLookup(min_match=-1, max_match=4)
