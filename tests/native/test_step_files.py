"""A decode step can be followed through a few files: what docs/step.md describes."""

import sys
from pathlib import Path
from types import FrameType

import pagedserve
from pagedserve import EngineArgs, LLMEngine, SamplingParams
from pagedserve.sampling_params import RequestOutputKind
from tests.support.tiny import save_tiny_llama

PACKAGE = Path(pagedserve.__file__).parent
MAX_FILES = 20


def test_a_plain_decode_step_passes_few_files(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    args = EngineArgs(str(tmp_path), backend="native", num_gpu_blocks=16, use_tqdm_on_load=False)
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    files: set[Path] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE))

    with LLMEngine(args) as engine:
        engine.add_request("a", {"prompt_token_ids": [3, 4, 5]}, params)
        for _ in range(3):
            engine.step()
        sys.setprofile(note)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    assert Path("engine/loop.py") in files
    assert len(files) <= MAX_FILES, sorted(map(str, files))
