"""Headers of GGUF files that announce what is not there: refused before anything is made of it."""

import os
import struct
from pathlib import Path

import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter

from pagedserve.errors import ModelLoadError
from pagedserve.models.load.convert import check_gguf
from pagedserve.models.load.gguf_header import read_fields
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
    "dimensions": (TENSOR + struct.pack("<I", 1 << 31) + bytes(99), "reading what"),
    "size": (TENSOR + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0) + bytes(99), "reading what"),
    "version": (header(0, 0, 99), "version 99"),
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


def test_either_order_of_bytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 1 << 60))
    with pytest.raises(ModelLoadError, match="announces 1152921504606846976 fields"):
        check_gguf(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match=r"a\.gguf is no regular file"):
        resolve_model(str(tmp_path / "a.gguf")).directory()


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
    assert read_fields(tmp_path / "a.gguf", "a.") == expected
    assert read_fields(tmp_path / "a.gguf", "b.", "general.arch") == {
        "general.architecture": "llama",
        "b.other": "y",
    }


@pytest.mark.parametrize(
    "case", [case for case, (content, _) in CASES.items() if not content.startswith(TENSOR)]
)
def test_fields_of_a_header_that_lies_are_not_read(tmp_path: Path, case: str) -> None:
    (tmp_path / "a.gguf").write_bytes(CASES[case][0])
    with pytest.raises(ValueError, match=r"announce|value of type|version 99"):
        read_fields(tmp_path / "a.gguf", "")
