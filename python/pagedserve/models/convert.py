"""GGUF files, converted once to Hugging Face format in the user's cache directory.

Invariants:

1. A directory of the cache is complete: it is written under another name and renamed.
2. Its name depends on the file's path, size and modification time, the version of transformers
   and the format version below, so a copy is never stale.
"""

import gc
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from pagedserve.errors import ModelLoadError
from pagedserve.host_ops.heap import return_freed_memory
from pagedserve.models.config_checks import check_config
from pagedserve.models.gguf_header import check_header
from pagedserve.models.progress import bars_of, quiet_logger, say
from pagedserve.regular_files import read_start

_FORMAT_VERSION = 1


def cache_directory() -> Path:
    """$PAGEDSERVE_CACHE, else $XDG_CACHE_HOME/pagedserve, else ~/.cache/pagedserve."""
    named = os.environ.get("PAGEDSERVE_CACHE")
    if named:
        return Path(named).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pagedserve"


def converted_directory(gguf: Path) -> Path:
    """Return the Hugging Face directory of a GGUF file, converting the file if necessary.

    Args:
        gguf: the file.

    Returns:
        A directory with config, float32 weights and tokenizer.

    Raises:
        ModelLoadError: the file is not a complete GGUF file or cannot be converted.
    """
    target = cache_directory() / "converted" / f"{gguf.stem}-{_key(gguf)}"
    if target.is_dir():
        return target
    check_gguf(gguf)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    except OSError as error:
        raise ModelLoadError(
            f"{gguf.name} needs a converted copy, but {target.parent} cannot be written ({error}); "
            "set PAGEDSERVE_CACHE to a directory that can"
        ) from error
    say(f"converting {gguf.name}, once: the copy is kept in {target}")
    try:
        _convert(gguf, work)
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def check_gguf(gguf: Path) -> None:
    """Check that a file is GGUF and that all its tensors lie within it.

    Raises:
        ModelLoadError: it is not.
    """
    from gguf import GGUFReader

    try:
        magic, size = read_start(gguf, 4), gguf.stat().st_size
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    if magic != b"GGUF":
        raise ModelLoadError(
            f"{gguf} is not a GGUF file: it starts with {magic!r}, a GGUF file with b'GGUF'"
        )
    try:
        check_header(gguf)
        tensors = GGUFReader(gguf).tensors
    except Exception as error:  # the reader slices beyond the end: many unrelated types
        raise ModelLoadError(
            f"{gguf} is cut short or damaged: it has {size} bytes, and reading what its header "
            f"announces failed ({error})"
        ) from error
    end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in tensors), default=0)
    if not tensors or end > size:
        raise ModelLoadError(
            f"{gguf} is cut short: its tensors need {end} bytes, the file has {size}"
        )


def _key(gguf: Path) -> str:
    import transformers

    status = gguf.stat()
    identity = (
        _FORMAT_VERSION,
        transformers.__version__,
        str(gguf.resolve()),
        status.st_size,
        status.st_mtime_ns,
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def _convert(gguf: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    try:
        _convert_weights(gguf, directory)
        # A model is part of reference cycles: without a collection it would still be in memory when
        # the copy is loaded.
        gc.collect()
        return_freed_memory()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.save_pretrained(directory)
    except Exception as error:  # transformers raises many unrelated types here
        raise ModelLoadError(f"{gguf} cannot be converted by transformers: {error}") from error


def _convert_weights(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GgufConfig,
        modeling_gguf_pytorch_utils,
    )

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    check_config(config.to_dict())
    weights = directory / "weights.gguf"
    with quiet_logger("gguf.gguf_writer"):
        _copy_without_vocabulary(gguf, weights)
    with bars_of(modeling_gguf_pytorch_utils):
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            gguf_file=weights.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    weights.unlink()
    model.save_pretrained(directory)


def _copy_without_vocabulary(gguf: Path, target: Path) -> None:
    """Copy the file without its vocabulary, of which the reader would create permanent objects.

    Args:
        gguf: complete file.
        target: copy, without the fields ``tokenizer.*``.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys

    reader = GGUFReader(gguf)
    architecture = Keys.General.ARCHITECTURE
    writer = GGUFWriter(target, reader.fields[architecture].contents(), endianess=reader.endianess)
    of_writer = (architecture, Keys.General.ALIGNMENT)
    for name, field in reader.fields.items():
        if name not in of_writer and not name.startswith(("GGUF.", "tokenizer.")):
            is_array = field.types[0] == GGUFValueType.ARRAY
            inner = field.types[-1] if is_array else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    writer.close()


def _publish(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        # Another process converted the same file meanwhile; its copy is equivalent.
        if not target.is_dir():
            raise
