"""A tiny Whisper, made once, and what transformers makes of sounds."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch

from pagedserve import LLM
from tests.support.whisper import WhisperOracle, save_whisper


class Listener(NamedTuple):
    """A tiny model in a directory, and transformers' own."""

    directory: Path
    oracle: WhisperOracle

    def load(self, **options: Any) -> LLM:
        given: dict[str, Any] = {"num_gpu_blocks": 512, "block_size": 4}
        given |= {"generation_config": "vllm", "use_tqdm_on_load": False}
        return LLM(str(self.directory), **(given | options))


MakeListener: TypeAlias = Callable[..., Listener]


@pytest.fixture(scope="session")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeListener]:
    folder = tmp_path_factory.mktemp("speech")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other in steps this small

    @cache
    def made(*, languages: bool = True) -> Listener:
        directory = save_whisper(folder / f"languages-{languages}", languages=languages)
        return Listener(directory, WhisperOracle(directory))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDSERVE_CACHE", str(folder / "cache"))
        yield made
    torch.set_num_threads(num_threads)
