"""The bench of the engine; its figures are not judged here."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pagedserve import LLM

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"
REQUESTS = [
    {"id": index, "prompt": list(range(100, 100 + num_tokens)), "out": 6}
    for index, num_tokens in enumerate((3, 40, 17))
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script by name, as its neighbours do."""
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module


@pytest.fixture
def engine(load: Any) -> ModuleType:
    module: ModuleType = load("engine")
    return module


def test_engine_measures_a_load(engine: ModuleType, smollm2: "LLM") -> None:
    result = engine.measure(smollm2, REQUESTS)
    assert result.generated_tokens == 18
    assert result.prompt_tokens == 60
    assert 0 < result.first_token_p50 <= result.first_token_p99 < result.seconds
    assert 0 < result.per_output_token_p50 <= result.per_output_token_p99
    assert 0 < result.outside_model < 1
    assert result.peak_rss_gib > 0
