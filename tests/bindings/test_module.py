"""``pagedserve.scheduler``: the public home of the core, without torch."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pagedserve
import pagedserve.scheduler
from pagedserve import _core, errors


def test_importing_and_scheduling_load_no_extra() -> None:
    code = (
        "import sys, numpy as np\n"
        "from pagedserve.scheduler import *\n"
        "config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)\n"
        "scheduler = Scheduler(config, CacheConfig(block_size=4, num_gpu_blocks=32))\n"
        "scheduler.add_seq_group(np.array([11, 12, 13], np.int32), arrival_time=0.0)\n"
        "assert scheduler.schedule(0.0).num_rows == 1\n"
        "try: BlockSpaceManager(CacheConfig(block_size=4, num_gpu_blocks=0))\n"
        "except ConfigError: pass\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "transformers", "triton", "tqdm", "gguf", "jinja2"} & set(loaded)
    ours = {name for name in loaded if name.split(".")[0] == "pagedserve"}
    assert ours == {
        *("pagedserve", "pagedserve._core", "pagedserve._core.cpu"),
        *("pagedserve.collector", "pagedserve.errors", "pagedserve.scheduler"),
    }


def test_it_has_every_class_of_the_core_and_every_error_that_it_raises() -> None:
    offered = {
        name for name in pagedserve.scheduler.__all__ if not issubclass(_of(name), Exception)
    }
    assert offered == set(_core.__all__) - {"__version__", "cpu"}
    raised = {name for name in pagedserve.scheduler.__all__ if issubclass(_of(name), Exception)}
    source = Path(__file__).resolve().parents[2] / "rust" / "py" / "src" / "error.rs"
    assert raised == set(re.findall(r'=> "(\w+)"', source.read_text()))
    assert all(_of(name) is getattr(errors, name) for name in raised)
    assert all(_of(name) is getattr(_core, name) for name in offered)


def test_its_example_runs() -> None:
    text = pagedserve.scheduler.__doc__ or ""
    example = doctest.DocTestParser().get_doctest(text, {}, "scheduler", None, None)
    assert len(example.examples) > 5
    assert doctest.DocTestRunner().run(example).failed == 0


def _of(name: str) -> type:
    found: type = getattr(pagedserve.scheduler, name)
    return found
