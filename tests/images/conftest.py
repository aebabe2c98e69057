"""Tiny models that take images, one of each family, made once."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch

from pagedserve import LLM
from tests.support.images import ImageOracle, save_image_model


class Family(NamedTuple):
    """A tiny model in a directory, and what transformers makes of it."""

    directory: Path
    oracle: ImageOracle

    def load(self, **options: Any) -> LLM:
        given: dict[str, Any] = {"num_gpu_blocks": 256, "max_model_len": 128}
        given |= {"generation_config": "vllm", "use_tqdm_on_load": False}
        return LLM(str(self.directory), **(given | options))


MakeFamily: TypeAlias = Callable[[str], Family]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeFamily]:
    folder = tmp_path_factory.mktemp("images")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other in steps this small

    @cache
    def made(name: str) -> Family:
        directory = save_image_model(name, folder / name)
        return Family(directory, ImageOracle(directory))

    yield made
    torch.set_num_threads(num_threads)
