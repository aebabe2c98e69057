"""Headers that lie, weights that are missing or odd: refused by name before anything is packed."""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError, UnsupportedModelError
from pagedserve.models.tokenizer.gguf_tokenizer import tokenizer_of_gguf
from pagedserve.native import packing
from pagedserve.native.gguf_file import read_gguf
from pagedserve.native.load import LoadedNative, load_native
from pagedserve.native.packing import Packer
from pagedserve.native.safetensors_file import read_safetensors
from tests.support.decoders import save_decoder
from tests.support.gguf_models import write_gguf
from tests.support.native import logits_of
from tests.support.quantized_models import AWQ, GPTQ, PACKED, write_quantized

LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
SCHEMES = {scheme.method: scheme for scheme in (GPTQ, AWQ, PACKED)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("original"), "llama")


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(path: Path, **options: Any) -> LoadedNative:
    return load_native(EngineArgs(str(path), backend="native", **options))


def change_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write a safetensors file anew with another header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def setting(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header[name].__setitem__(key, value)


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "dtype": (setting(NORM, "dtype", "F12"), "of dtype 'F12'; known are"),
    "no entry": (lambda header: header.__setitem__(NORM, 7), "of dtype 'None'"),
    "shape": (setting(NORM, "shape", [-1]), r"of shape \[-1\]"),
    "huge": (setting(NORM, "shape", [1 << 60]), "needs 4611686018427387904 bytes"),
    "beyond": (setting(NORM, "data_offsets", [1 << 40, (1 << 40) + 256]), "cut short or damaged"),
    "offsets": (setting(NORM, "data_offsets", [0]), r"at \[0\]"),
    "no JSON": (lambda _: b"{", "its header is no JSON"),
    "nested": (lambda _: b"[" * 100_000, "its header is no JSON"),
    "no object": (lambda _: b"[]", "its header is no object"),
    "twice": (lambda _: b'{"a": {}, "a": {}}', "has 'a' twice"),
    "gone": (lambda header: header.pop(NORM), "follows a gap|its tensors end at"),
    "overlap": (
        lambda header: header[NORM].__setitem__("data_offsets", [0, 256]),
        "overlaps the one before it|follows a gap",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_safetensors_that_lies_is_refused(saved: Path, case: str) -> None:
    change, words = HEADERS[case]
    change_header(saved / WEIGHTS, change)
    with pytest.raises(ModelLoadError, match=words):
        load(saved)


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 100, 20_000])
def test_a_file_that_is_cut_short_is_refused(saved: Path, num_bytes: int) -> None:
    file = saved / WEIGHTS
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelLoadError, match=r"cut short|is empty"):
        load(saved)


def test_random_damage_is_refused_or_read(original: Path, tmp_path: Path) -> None:
    content = bytearray((original / WEIGHTS).read_bytes())
    length = int.from_bytes(content[:8], "little")
    random = np.random.default_rng(4)
    for _ in range(300):
        damaged = bytearray(content)
        for place in random.integers(0, 8 + length, 3):
            damaged[place] = random.integers(0, 256)
        (file := tmp_path / WEIGHTS).write_bytes(damaged)
        try:
            read_safetensors(file)
        except ValueError as error:
            assert WEIGHTS in str(error)  # noqa: PT017


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(directory / WEIGHTS)
    change(weights)
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop(QUERY), f"lack 1 of the model's weights, .*'{QUERY}'"),
        (
            lambda weights: weights.update({QUERY: torch.zeros(3, 64)}),
            rf"'{QUERY}' is \(3, 64\) in its files, and its config makes it \(64, 64\)",
        ),
        (
            lambda weights: weights.update({QUERY: torch.zeros(64, 64, dtype=torch.int8)}),
            f"'{QUERY}' as I8; the native backend reads F32",
        ),
        (
            lambda weights: weights[QUERY].view(-1).__setitem__(slice(3), torch.nan),
            f"3 of the 4096 numbers of '{QUERY}' are infinite or no numbers",
        ),
        (
            lambda weights: weights[NORM].__setitem__(5, torch.inf),
            f"1 of the 64 numbers of '{NORM}' are infinite or no numbers",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    change_weights(saved, change)
    with pytest.raises(ModelLoadError, match=words):
        load(saved)


@pytest.mark.parametrize(
    ("dtype", "quantization", "choices"),
    [
        (torch.float32, None, "dtype='bfloat16' or quantization='int8' or a smaller model"),
        (torch.bfloat16, None, "quantization='int8' or a smaller model"),  # 16 bits remain
        (torch.float32, "int8", "dtype='bfloat16' or a smaller model"),  # for the embedding
        (torch.bfloat16, "int8", "a smaller model"),
        (torch.bfloat16, "w8a8", "a smaller model"),
    ],
)
def test_weights_that_need_more_memory_than_is_free_are_refused(
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    quantization: str | None,
    choices: str,
) -> None:
    change_weights(
        saved, lambda weights: weights.update({k: v.to(dtype) for k, v in weights.items()})
    )
    num_bytes = load(saved, quantization=quantization).model.weight_bytes
    monkeypatch.setattr(packing, "free_host_bytes", lambda: num_bytes)
    load(saved, quantization=quantization)
    monkeypatch.setattr(packing, "free_host_bytes", lambda: num_bytes - 1)
    with pytest.raises(ConfigError, match=rf"KiB for its weights.* KiB .*: give {choices}$"):
        load(saved, quantization=quantization)


def test_blocks_of_a_file_have_no_smaller_form(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(saved, tmp_path / "model.gguf", Type.Q4_0)
    monkeypatch.setattr(packing, "free_host_bytes", lambda: 0)
    with pytest.raises(ConfigError, match=r"of memory are free: give a smaller model$"):
        load(path, quantization="gguf")


def test_shards_are_read_by_their_index(saved: Path) -> None:
    weights = load_file(saved / WEIGHTS)
    (saved / WEIGHTS).unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, saved / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index = saved / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    load(saved)
    save_file({name: weights[name] for name in names[9:]}, saved / "b.safetensors")
    with pytest.raises(ModelLoadError, match=f"'{names[9]}' is in b.safetensors and in another"):
        load(saved)


def test_files_of_torch_are_refused(saved: Path) -> None:
    weights = load_file(saved / WEIGHTS)
    (saved / WEIGHTS).unlink()
    torch.save(weights, saved / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"has no model.safetensors.*backend='torch'"):
        load(saved)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"lack 1 .* 'score\.weight'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"is_causal": False}, "is_causal is False"),
        ({"hidden_act": "relu"}, "hidden_act is relu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear', which needs factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor is .x.; it must be"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"intermediate_size": 100}, "intermediate_size is 100"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 0}},
            "low_freq_factor is 0.0; it must be finite and above 0",
        ),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 4}},
            "high_freq_factor is 4.0; it must be above low_freq_factor, 4.0",
        ),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1|the epsilon of its norms is -1"),
        ({"hidden_size": None}, "hidden_size is None; it must be an integer"),
        ({"vocab_size": 10}, r"is \(97, 64\) in its files, and its config makes it \(10, 64\)"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    saved: Path, fields: dict[str, Any], words: str
) -> None:
    file = saved / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ModelLoadError, match=words):
        load(saved)


@pytest.fixture(scope="module")
def gguf_content(original: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(original, path).read_bytes()


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def header(num_tensors: int, num_fields: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    entry = text(name) + struct.pack("<I", len(sizes))
    return entry + struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)


GGUF_HEADERS = {
    "magic": (b"GGML" + bytes(99), "starts with b'GGML'"),
    "version": (header(0, 0, 99), "of version 99; accepted are 2 and 3"),
    "order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "with the other byte order"),
    "fields": (header(0, 1 << 60), "announces 1152921504606846976 fields"),
    "tensors": (header(1 << 60, 0), "announces 1152921504606846976 tensors"),
    "no tensors": (header(0, 0), "it has no tensors"),
    "end": (header(0, 3), "announces a number of 8 bytes at byte 24 of 24"),
    "name": (
        header(0, 1) + struct.pack("<Q", 1 << 60),
        "a field's name of 1152921504606846976 bytes",
    ),
    "value": (header(0, 1) + text("a") + struct.pack("<I", 99), "a value of type 99"),
    "array": (
        header(0, 1) + text("a") + struct.pack("<IIQ", 9, 0, 1 << 60),
        "its arrays announce 1152921504606846976 elements",
    ),
    "texts": (
        header(0, 1) + text("a") + struct.pack("<IIQQ", 9, 8, 2, 1 << 63) + bytes(9),
        "a text of 9223372036854775808 bytes",
    ),
    "arrays": (header(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "or arrays within arrays"),
    "type": (
        header(1, 0) + tensor("t", 8, kind=99) + bytes(99),
        "'t' is of type 99; the native",
    ),
    "no dimension": (header(1, 0) + tensor("t") + bytes(99), "has 0 dimensions; it must have 1"),
    "dimensions": (header(1, 0) + tensor("t", 1, 1, 1, 1, 1) + bytes(99), "has 5 dimensions"),
    "blocks": (header(1, 0) + tensor("t", 8, kind=2) + bytes(99), "no whole blocks of 32"),
    "size": (header(1, 0) + tensor("t", 1 << 40, 1 << 40) + bytes(99), "needs 48357032784585"),
    "offset": (header(1, 0) + tensor("t", 8, offset=1 << 50) + bytes(99), "needs 32 bytes from"),
    "twice": (header(2, 0) + 2 * tensor("t", 8) + bytes(99), "it has 't' twice"),
    "overlap": (
        header(2, 0) + tensor("t", 16) + tensor("u", 8, offset=32) + bytes(200),
        "'u' overlaps 't'",
    ),
}


@pytest.mark.parametrize("case", GGUF_HEADERS)
def test_a_header_of_gguf_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    content, words = GGUF_HEADERS[case]
    (path := tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=words):
        load(path)


def test_a_long_text_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    field = text("general.architecture") + struct.pack("<IQ", 8, 1 << 36)
    path.write_bytes(header(0, 1) + field)
    os.truncate(path, 1 << 37)  # sparse
    with pytest.raises(ModelLoadError, match=r"a text of 68719476736 bytes .* at most 16777216"):
        load(path)
    with pytest.raises(ModelLoadError, match="a text of 68719476736 bytes"):
        tokenizer_of_gguf(path)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_is_cut_short_during_the_load_is_refused(
    saved: Path, kind: str, gguf_content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved / WEIGHTS
    if kind == "gguf":
        (file := saved / "model.gguf").write_bytes(gguf_content)
    pack = Packer.pack

    def cut_short_and_pack(packer: Packer) -> int:
        os.truncate(file, file.stat().st_size // 2)
        return pack(packer)

    monkeypatch.setattr(Packer, "pack", cut_short_and_pack)
    with pytest.raises(ModelLoadError, match="cut short or cannot be read while it is loaded"):
        load(file if kind == "gguf" else saved)


def test_vectors_of_a_file_that_is_cut_short_are_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = Packer.pack

    def pack_and_cut_short(packer: Packer) -> int:
        num_bytes = pack(packer)
        os.truncate(saved / WEIGHTS, 1000)
        return num_bytes

    monkeypatch.setattr(Packer, "pack", pack_and_cut_short)
    with pytest.raises(ModelLoadError, match=f"{WEIGHTS} was cut short while it was read"):
        load(saved)


def test_doubled_names_are_found_at_once(tmp_path: Path) -> None:
    names = "".join(f'"{number}": {{}}, ' for number in range(200_000))
    content = f'{{{names}"199999": {{}}}}'.encode()
    (tmp_path / WEIGHTS).write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ValueError, match="has '199999' twice"):
        read_safetensors(tmp_path / WEIGHTS)


def test_random_damage_to_gguf_is_refused_or_read(gguf_content: bytes, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    for _ in range(300):
        damaged = bytearray(gguf_content)
        for place in random.integers(0, 3000, 3):
            damaged[place] = random.integers(0, 256)
        (file := tmp_path / "a.gguf").write_bytes(damaged)
        try:
            read_gguf(file)
        except ValueError as error:
            assert "a.gguf" in str(error)  # noqa: PT017


@contextmanager
def at_most_more(num_bytes: int) -> Iterator[None]:
    """Fail allocations once the process has so many more bytes of address space."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def damaged_blocks(content: bytes, start: int, random: np.random.Generator) -> bytes:
    """A file with random bytes or numbers in its header, cut short, or with scales of NaN."""
    damaged, kind = bytearray(content), random.integers(0, 4)
    if kind == 0:
        for place in random.integers(0, start, 3):
            damaged[place] = random.integers(0, 256)
    elif kind == 1:
        number = int(random.choice(np.array([0, 1, 1 << 32, 1 << 40, 1 << 63], np.uint64)))
        place = random.integers(0, start - 8)
        damaged[place : place + 8] = number.to_bytes(8, "little")
    elif kind == 2:
        del damaged[random.integers(0, len(damaged)) :]
    else:
        for place in random.integers(start // 2, len(damaged) // 2, 20):
            damaged[2 * place : 2 * place + 2] = b"\x00\x7e"
    return bytes(damaged)


def model_to_damage(original: Path, directory: Path, quantization: str | None) -> tuple[Path, int]:
    """Weights that have the blocks or numbers of an option, and where their data begin."""
    if scheme := SCHEMES.get(quantization or ""):
        file = shutil.copytree(original, directory / "model") / WEIGHTS
        write_quantized(file.parent, scheme, directory / "dense")
        return file, 8 + int.from_bytes(file.read_bytes()[:8], "little")
    file = write_gguf(
        original, directory / "a.gguf", Type.Q4_0, storages={"v_proj": Type.Q8_0, "down": Type.Q5_1}
    )
    return file, min(int(tensor.data_offset) for tensor in gguf.GGUFReader(file).tensors)


@pytest.mark.parametrize("quantization", [None, "gguf", "w8a8", "int4", *SCHEMES])
def test_damaged_blocks_are_refused_or_served(
    original: Path, tmp_path: Path, quantization: str | None
) -> None:
    file, start = model_to_damage(original, tmp_path, quantization)
    model = file.parent if quantization in SCHEMES else file
    content, random = file.read_bytes(), np.random.default_rng(6)
    num_refused = 0
    with at_most_more(1 << 30):
        for _ in range(100):
            file.write_bytes(damaged_blocks(content, start, random))
            try:
                loaded = load(model, quantization=quantization)
            except ModelLoadError as error:
                assert str(model) in str(error)  # noqa: PT017
                num_refused += 1
                continue
            assert logits_of(loaded, np.arange(20, dtype=np.int32)).shape[0] == 20
    assert 20 < num_refused < 100


def test_an_architecture_of_gguf_that_is_not_known_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="is 'mamba'; the native backend has llama"):
        load(tmp_path / "a.gguf")


def test_a_pipe_is_not_waited_for(saved: Path) -> None:
    (saved / WEIGHTS).unlink()
    os.mkfifo(saved / WEIGHTS)
    os.mkfifo(saved / "a.gguf")
    with pytest.raises(ModelLoadError, match=r"no model.safetensors|no weights"):
        load(saved)
    with pytest.raises(ModelLoadError, match="no regular file"):
        load(saved / "a.gguf")
