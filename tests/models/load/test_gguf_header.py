"""Headers of GGUF files that announce what is not there: refused before anything is made of it."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter

import pagedserve.models.load.gguf_header as gguf_header
from pagedserve.errors import ModelLoadError
from pagedserve.models.load.convert import check_gguf
from pagedserve.models.load.gguf_header import (
    GgufHeader,
    GgufVersionError,
    TextList,
    end_token_ids,
    header_of,
    read_header,
)
from pagedserve.models.load.sources import resolve_model

STRING, ARRAY, INTEGER = 8, 9, 4


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def header(num_tensors: int, num_fields: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def array(kind: int, count: int) -> bytes:
    return header(0, 1) + text("a") + struct.pack("<IIQ", ARRAY, kind, count)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", STRING) + text("llama")
TENSOR = header(1, 1) + ARCHITECTURE + text("t")
CASES = {
    "fields": (header(0, 1 << 60), "announces 1152921504606846976 fields; .* at most 65536"),
    "tensors": (header(1 << 60, 0), "announces 1152921504606846976 tensors; .* at most 65536"),
    "fewer fields": (
        header(0, 100) + ARCHITECTURE,
        "announces a number of 8 bytes at byte 69 of 69",
    ),
    "name": (header(0, 1) + struct.pack("<Q", 1 << 60), "a field's name of 1152921504606846976"),
    "text": (
        header(0, 1) + text("a") + struct.pack("<IQ", STRING, 1 << 60),
        "announces a text of 1152921504606846976 bytes at byte 45 of 45",
    ),
    "array of numbers": (array(0, 1 << 60), "announce 1152921504606846976 elements; .* 4000000"),
    "array of texts": (array(STRING, 1 << 40) + bytes(1 << 20), "announce 1099511627776 elements"),
    "array beyond the end": (
        array(INTEGER, 1000) + bytes(100),
        "an array of 4000 bytes at byte 49",
    ),
    "arrays in arrays": (array(ARRAY, 1) * 2, "a value of type 9, or arrays within arrays"),
    "type": (header(0, 1) + text("a") + struct.pack("<I", 99), "it has a value of type 99"),
    "type of a tensor": (TENSOR + struct.pack("<IQIQ", 1, 8, 999, 0) + bytes(99), "failed .*999"),
    "offset": (TENSOR + struct.pack("<IQIQ", 1, 8, 0, 1 << 60) + bytes(99), "reading what"),
    "dimensions": (TENSOR + struct.pack("<I", 1 << 31) + bytes(99), "'t' has 2147483648 dimension"),
    "entry": (TENSOR + struct.pack("<I", 1), "announces a number of 8 bytes"),
    "twice": (header(0, 2) + 2 * ARCHITECTURE, "the field 'general.architecture' twice"),
    "alignment": (
        header(0, 1) + text("general.alignment") + struct.pack("<II", INTEGER, 3),
        "general.alignment is 3; it must be a multiple of 8",
    ),
    "text of a list": (
        array(STRING, 1) + struct.pack("<Q", 5000) + bytes(5000),
        "a text of 5000 bytes at byte 57 of 5057; accepted are at most 4096",
    ),
    "lists that end": (array(STRING, 3) + text("a"), "a text of 8 bytes at byte 58 of 58"),
    "size": (TENSOR + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0) + bytes(99), "reading what"),
    "nothing": (b"GGUF", "announces a number of 4 bytes at byte 4 of 4"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    content, said = CASES[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=said) as caught:
        check_gguf(path)
    assert "a.gguf is cut short or damaged: it has" in str(caught.value)


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(header(0, 0, 99))
    with pytest.raises(GgufVersionError, match="of version 99; accepted are 2 and 3"):
        read_header(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match="of version 99"):
        check_gguf(tmp_path / "a.gguf")


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"a\.gguf is one of 3 files of a model: merge them"):
        check_gguf(tmp_path / "a.gguf")


def test_either_order_of_bytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 1 << 60))
    with pytest.raises(ModelLoadError, match="announces 1152921504606846976 fields"):
        check_gguf(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match=r"a\.gguf is no regular file"):
        resolve_model(str(tmp_path / "a.gguf")).directory()


def values(found: GgufHeader) -> dict[str, Any]:
    """Fields of a header, with all lists read."""
    return {
        name: value.texts if isinstance(value, TextList) else value
        for name, value in found.fields.items()
    }


@pytest.mark.parametrize("order", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_fields_are_those_of_the_gguf_package(tmp_path: Path, order: GGUFEndian) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama", endianess=order)
    writer.add_uint8("a.byte", 200)
    writer.add_int16("a.short", -5)
    writer.add_uint32("a.number", 1 << 31)
    writer.add_int64("a.long", -(1 << 60))
    writer.add_float32("a.float", 0.5)
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "wörld\n")
    writer.add_array("a.numbers", [1, 2, 1 << 20])
    writer.add_array("a.floats", [0.5, -2.0])
    writer.add_array("a.texts", ["", "日本", "x" * 300])
    writer.add_string("b.other", "y")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = GGUFReader(tmp_path / "a.gguf").fields
    expected = {name: field.contents() for name, field in fields.items() if name[:2] == "a."}
    found = read_header(tmp_path / "a.gguf")
    assert found.is_big_endian == (order == GGUFEndian.BIG)
    assert values(found) == {"general.architecture": "llama", "b.other": "y"} | expected
    assert found.spans == {
        name: (field.offset, field.offset + sum(part.nbytes for part in field.parts))
        for name, field in fields.items()
        if not name.startswith("GGUF.")
    }


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|return|>", "<|end|>", "a", "<|call|>"], [0, 3]),
        (["<|return|>", "<|end|>", "a"], [0, 1]),
        (["<|endoftext|>", "<|end|>", "a", "<|call|>"], [0, 1, 3]),
    ],
)
def test_the_end_of_a_message_of_harmony_ends_no_sequence(
    tmp_path: Path, tokens: list[str], ends: list[int]
) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "gpt-oss")
    writer.add_eos_token_id(0)
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert end_token_ids(read_header(tmp_path / "a.gguf").fields) == ends


def test_tensors_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.zeros((3, 5), np.float32))
    writer.add_tensor("b", np.zeros(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader, found = GGUFReader(tmp_path / "a.gguf"), read_header(tmp_path / "a.gguf")
    assert found.alignment == 64
    assert [
        (entry.name, [*reversed(entry.shape)], entry.kind, found.data_offset + entry.offset)
        for entry in found.tensors
    ] == [
        (tensor.name, tensor.shape.tolist(), tensor.tensor_type, tensor.data_offset)
        for tensor in reader.tensors
    ]


def test_lists_longer_than_what_is_read_at_once_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["x" * (number % 50) for number in range(300)]
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("a.texts", texts)
    writer.add_array("a.numbers", [*range(300)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr(gguf_header, "_PIECE", size)
        fields = values(read_header(tmp_path / "a.gguf"))
        assert (fields["a.texts"], fields["a.numbers"]) == (texts, [*range(300)])


def test_a_file_that_becomes_shorter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header(0, 1) + text("a") + struct.pack("<IIQ", ARRAY, 0, 5000) + bytes(5000))
    monkeypatch.setattr(gguf_header, "_PIECE", 16)
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.truncate(size - 100)
        with pytest.raises(ValueError, match=f"its end was at byte {size - 100} when it was read"):
            header_of(path, file.fileno(), size)
