import pytest

from tests.support.formula import FormulaModel


@pytest.fixture
def formula() -> FormulaModel:
    return FormulaModel()
