"""Servers for the examples of the docs, of models that are quick."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedserve import EngineArgs, LLMEngine
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served


def _served(model: Path, directory: Path) -> Served:
    args = EngineArgs(str(model), num_gpu_blocks=256, use_tqdm_on_load=False)
    options = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        served_model_name=("smollm2",),
        batch_directory=str(directory),
    )
    return Served(lambda: LLMEngine(args), options)


@pytest.fixture(scope="session")
def stand_in_server(stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the tiny model, by the name of the demo model."""
    with _served(stand_in, tmp_path_factory.mktemp("batches")) as running:
        yield running


@pytest.fixture(scope="session")
def embedding_server(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of all-MiniLM-L6-v2."""
    with _served(minilm, tmp_path_factory.mktemp("batches")) as running:
        yield running
