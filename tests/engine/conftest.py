from collections.abc import Iterator
from typing import Literal

import pytest

from pagedserve import LLM
from tests.support.formula import FormulaModel

Backend = Literal["native", "torch"]


@pytest.fixture
def formula() -> FormulaModel:
    return FormulaModel()


@pytest.fixture(scope="module", params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn, which must give the same answers."""
    found: Backend = request.param
    return found


@pytest.fixture(scope="module")
def real(model_package: None, backend: Backend) -> Iterator[LLM]:
    """The real model in float32; a test leaves it with no request in it."""
    llm = LLM("smollm2", backend=backend, dtype="float32", num_gpu_blocks=2048)
    yield llm
    llm.shutdown()
