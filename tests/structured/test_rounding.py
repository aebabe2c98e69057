"""Bounds of a schema's numbers that cannot be kept exactly."""

import random

import pytest

from pagedserve.sampling.schemas import MAX_EXACT, GrammarError, prepare_schema


@pytest.mark.parametrize(
    ("key", "bound", "rounded"),
    [
        ("minimum", -(2**63), -MAX_EXACT),
        ("exclusiveMinimum", -1.797e308, -MAX_EXACT),
        ("maximum", 2**63 - 1, MAX_EXACT),
        ("exclusiveMaximum", 10**400, MAX_EXACT),
        ("minimum", 0.30000000000000004, 0.3000000000000001),
        ("maximum", 0.30000000000000004, 0.3),
        ("minimum", -0.30000000000000004, -0.3),
        ("exclusiveMinimum", 123456789.12345679, 123456789.1234568),
        ("minimum", 5e-324, 1e-22),
        ("maximum", 5e-324, 0),
        ("minimum", -1e-30, 0),
        ("maximum", MAX_EXACT, MAX_EXACT),
        ("minimum", 0.1, 0.1),
        ("exclusiveMinimum", True, True),
    ],
)
def test_bounds_of_numbers_are_rounded_inward(key: str, bound: float, rounded: float) -> None:
    assert prepare_schema({"items": {key: bound}}) == {"items": {key: rounded}}


def test_random_bounds_are_rounded_inward() -> None:
    values = random.Random(0)
    for _ in range(2000):
        bound = values.uniform(-1, 1) * 10.0 ** values.randint(-40, 18)
        for key in ("minimum", "maximum"):
            try:
                rounded = prepare_schema({key: bound})[key]
            except GrammarError:
                assert abs(bound) > MAX_EXACT
                continue
            assert rounded >= bound if key == "minimum" else rounded <= bound
            assert prepare_schema({"const": rounded}) == {"const": rounded}
            if 1e-3 < abs(bound) < MAX_EXACT:
                assert rounded == pytest.approx(bound, rel=1e-14)
