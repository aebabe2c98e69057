"""The command on SmolLM2: the files that it writes, and what it prints of them."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pagedserve.cli import main
from pagedserve.config import EngineArgs
from pagedserve.models.load.sources import find_local
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.quantize.likelihood import WINDOW, windows
from pagedserve.quantize.run import _sample, quantize
from pagedserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedserve import LLM

TEXT = " ".join(_sample().split()[:80])
NUM_TOKENS = 70
GENERATED = ("--prompt", "The capital of France is", "--max-tokens", "4", "--temperature", "0")
REPORT = re.compile(
    r"wrote (?P<path>.+): (?P<after>[\d.]+) MB, before: (?P<before>[\d.]+) MB\n"
    r"matrices: (?P<matrices>.+)\n"
    r"perplexity: (?P<ours>[\d.]+), of .+: (?P<original>[\d.]+), ratio: (?P<ratio>[\d.]+)\n"
    r"KL divergence: (?P<kl>[\d.]+), same most likely token: (?P<same>[\d.]+)%, "
    r"tokens compared: (?P<tokens>\d+)\n?"
)


def parsed(report: str) -> dict[str, str]:
    """Figures of a report, by name."""
    found = REPORT.fullmatch(report)
    assert found is not None, report
    return found.groupdict()


@pytest.fixture(scope="module")
def w8a8(
    tmp_path_factory: pytest.TempPathFactory, model_package: None
) -> tuple[Path, dict[str, str]]:
    """SmolLM2's file in Q8_0, and the report."""
    output = tmp_path_factory.mktemp("quantized") / "w8a8.gguf"
    report = "\n".join(quantize(EngineArgs("smollm2"), "w8a8", output, TEXT, NUM_TOKENS))
    assert list(output.parent.iterdir()) == [output]
    return output, parsed(report)


def test_the_gguf_package_reads_the_same_fields_and_its_own_blocks(
    w8a8: tuple[Path, dict[str, str]],
) -> None:
    source = find_local("smollm2")
    assert source is not None
    before, after = gguf.GGUFReader(source.path), gguf.GGUFReader(w8a8[0])
    assert before.fields.keys() == after.fields.keys()
    for name in ("general.architecture", "tokenizer.ggml.merges", "tokenizer.chat_template"):
        assert before.fields[name].contents() == after.fields[name].contents()
    assert after.fields["general.file_type"].contents() == 7
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        if old.tensor_type != Type.Q4_1:
            assert np.array_equal(new.data, old.data), old.name
        elif old.name.startswith("blk.1."):  # one matrix of each kind
            numbers = gguf.quants.dequantize(old.data, Type.Q4_1)
            assert np.array_equal(new.data, gguf.quants.quantize(numbers, Type.Q8_0)), old.name


def test_figures_of_a_report(w8a8: tuple[Path, dict[str, str]], smollm2: "LLM") -> None:
    output, found = w8a8
    assert found["matrices"] == "1 Q8_0 unchanged, 210 Q4_1 to Q8_0"
    assert float(found["after"]) == pytest.approx(output.stat().st_size / 1e6, abs=0.06)
    assert int(found["tokens"]) == NUM_TOKENS - 1
    assert 0.98 < float(found["ratio"]) < 1.02
    assert 0 < float(found["kl"]) < 0.02
    # The original's perplexity is that of the engine with torch.
    ids = smollm2.get_tokenizer().encode(TEXT)[:NUM_TOKENS]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (answer,) = smollm2.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert answer.prompt_logprobs is not None
    logprobs = [
        entry[token].logprob
        for entry, token in zip(answer.prompt_logprobs, ids, strict=True)
        if entry is not None
    ]
    assert float(found["original"]) == pytest.approx(np.exp(-np.mean(logprobs)), rel=1e-3)


def test_int4_by_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, w8a8: tuple[Path, dict[str, str]]
) -> None:
    output = tmp_path / "int4.gguf"
    command = ["quantize", str(w8a8[0]), "--to", "int4", "-o", str(output), "--num-tokens", "202"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.err.splitlines()] == ["quantizing", "comparing"]
    found = parsed(printed.out)
    assert found["matrices"] == "1 Q8_0 unchanged, 210 Q8_0 to Q4_1"
    assert int(found["tokens"]) == 200  # of 2 windows
    assert 0.94 < float(found["ratio"]) < 1.06
    assert 0 < float(found["kl"]) < 0.05
    assert main(["generate", "--model", str(output), "--quantization", "gguf", *GENERATED]) == 0
    assert "Paris" in capsys.readouterr().out


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, model_package: None) -> None:
    output, text = tmp_path / "a.gguf", tmp_path / "text.txt"
    command = ["quantize", "smollm2", "-o", str(output), "--to"]
    text.write_text("")
    assert main([*command, "int4"]) == 2
    said = capsys.readouterr().err
    assert "none of its matrices, which are Q4_1, Q8_0, would change" in said
    assert main([*command, "w8a8", "--text", str(text)]) == 2
    assert "text: it has fewer than 2 tokens" in capsys.readouterr().err
    text.write_bytes(b"\xff")
    assert main([*command, "w8a8", "--text", str(text)]) == 2
    assert f"text: {text} is not UTF-8 text" in capsys.readouterr().err
    assert not output.exists()
    output.touch()
    assert main([*command, "w8a8"]) == 2
    assert f"output: '{output}' exists; give another name" in capsys.readouterr().err
    assert output.read_bytes() == b""


def test_windows_begin_as_texts_do(model_package: None) -> None:
    plain = load_tokenizer(EngineArgs("smollm2"), uses_transformers=False)

    class WithStart:
        """The tokenizer of a model whose texts begin with token 1."""

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            ids = plain.encode(text, add_special_tokens=False)
            return [1, *ids] if add_special_tokens else ids

    text = _sample()
    ids = plain.encode(text)
    assert np.concatenate(windows(plain, text, 450)).tolist() == ids[:450]
    found = windows(WithStart(), text, 450)  # type: ignore[arg-type]  # all that is called
    assert [len(window) for window in found] == [WINDOW, WINDOW, 450 - 2 * (WINDOW - 1) + 1]
    assert all(window[0] == 1 for window in found)
    assert np.concatenate([window[1:] for window in found]).tolist() == ids[:450]
    assert windows(plain, text, 2 * WINDOW + 1)[-1].size == WINDOW  # one token predicts nothing
