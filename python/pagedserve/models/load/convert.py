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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import ModelLoadError
from pagedserve.host_ops.heap import return_freed_memory
from pagedserve.models.load.bars import bars_of
from pagedserve.models.load.config_checks import check_config
from pagedserve.models.load.gguf_fields import (
    complete_config,
    fields_of_layers,
    name_in_transformers,
    rope_divisors,
    unused_tensors,
)
from pagedserve.models.load.gguf_header import (
    LIKE_LLAMA3,
    GgufHeader,
    chat_template_of,
    check_known,
    read_header,
)
from pagedserve.models.load.progress import quiet_logger, say

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedModel

_FORMAT_VERSION = 4
# Of the copy that transformers reads; it is deleted.
_WEIGHTS = "weights.gguf"


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
    reader = check_gguf(gguf)
    header = read_header(gguf)
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
        with _failing_as_one(gguf):
            with quiet_logger("gguf.gguf_writer"):
                _copy_without_vocabulary(reader, work / _WEIGHTS)
            divisors = rope_divisors(reader)
            del reader  # its vocabulary is hundreds of thousands of objects
            _convert(gguf, work, header, divisors)
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def check_gguf(gguf: Path) -> "GGUFReader":
    """Check that a file is GGUF and that all its tensors lie within it; return its reader.

    Raises:
        ModelLoadError: it is not.
    """
    from gguf import GGUFReader

    try:
        read_header(gguf)
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    size = gguf.stat().st_size
    try:
        reader = GGUFReader(gguf)
    except Exception as error:  # the reader slices beyond the end: many unrelated types
        raise ModelLoadError(
            f"{gguf} is cut short or damaged: it has {size} bytes, and reading what its header "
            f"announces failed ({error})"
        ) from error
    ends = [int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors]
    end = max(ends, default=0)
    if not ends or end > size:
        raise ModelLoadError(
            f"{gguf} is cut short: its tensors need {end} bytes, the file has {size}"
        )
    return reader


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


@contextmanager
def _failing_as_one(gguf: Path) -> Iterator[None]:
    """Turn the many unrelated exceptions of transformers and gguf into one."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{gguf} cannot be converted by transformers: {error}") from error


def _convert(
    gguf: Path, directory: Path, header: GgufHeader, divisors: NDArray[np.float32] | None
) -> None:
    from transformers import AutoConfig, PreTrainedConfig

    # The vocabulary takes seconds to read, which the configuration and the tokenizer do once each.
    fields, _ = PreTrainedConfig.get_config_dict(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.for_model(**fields | fields_of_layers(header))
    complete_config(config, header, divisors)
    check_config(config.to_dict())
    _convert_weights(gguf.name, config, header, directory)
    # A model is part of reference cycles: without a collection it would still be in memory when the
    # copy is loaded.
    gc.collect()
    return_freed_memory()
    convert_tokenizer(gguf, header, directory)


def convert_tokenizer(gguf: Path, header: GgufHeader, directory: Path) -> None:
    """Convert the tokenizer, with what transformers does not read of its kind."""
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import Metaspace
    from transformers import AutoTokenizer, TokenizersBackend

    is_like_llama3 = header.fields.get("tokenizer.ggml.pre") in LIKE_LLAMA3
    start = {"add_bos_token": header.fields.get("tokenizer.ggml.add_bos_token", True)}
    # The first makes a config of the file once more, which has no lists by layer.
    loader: Any = TokenizersBackend if fields_of_layers(header) else AutoTokenizer
    tokenizer = loader.from_pretrained(
        gguf.parent, gguf_file=gguf.name, **(start if is_like_llama3 else {})
    )
    backend = tokenizer.backend_tokenizer
    if is_like_llama3:
        backend.model.ignore_merges = True
    is_spaced = header.fields.get("tokenizer.ggml.add_space_prefix", True)
    if not is_spaced and isinstance(backend.pre_tokenizer, Metaspace):  # Gemma's adds no space
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer.chat_template = chat_template_of(header.fields)
    tokenizer.save_pretrained(directory)


def _convert_weights(
    name: str, config: "PretrainedConfig", header: GgufHeader, directory: Path
) -> None:
    """Convert the copy without a vocabulary, which is in the directory, and delete it."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig, modeling_gguf_pytorch_utils

    from pagedserve.models.load.checkpoint_checks import checked_loading

    with bars_of(modeling_gguf_pytorch_utils), checked_loading(name, ()):
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            gguf_file=_WEIGHTS,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    _check_all_read(name, model, header)
    (directory / _WEIGHTS).unlink()
    model.save_pretrained(directory)


def _check_all_read(name: str, model: "PreTrainedModel", header: GgufHeader) -> None:
    """Check that transformers read all tensors of layers and of the head; it drops unknown ones.

    Raises:
        ModelLoadError: Names the first that it did not read.
    """
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    architecture = str(header.fields.get("general.architecture"))
    processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    read = get_gguf_hf_weights_map(model, processor())
    # Matrices of all experts of a layer, which have no suffix there.
    read |= {f"{tensor}.weight": tensor for tensor in read if tensor.endswith("_exps")}
    read |= dict.fromkeys(unused_tensors(model.config), "")
    tensors = [name_in_transformers(tensor.name) for tensor in header.tensors]
    check_known(name, tensors, read)


def _copy_without_vocabulary(reader: "GGUFReader", target: Path) -> None:
    """Copy a file without its vocabulary, of which transformers would create permanent objects.

    Tensors get the names that transformers reads.

    Args:
        reader: of a complete file.
        target: copy, without the fields ``tokenizer.*``.
    """
    from gguf import GGUFValueType, GGUFWriter, Keys

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
        name = name_in_transformers(tensor.name)
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
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
