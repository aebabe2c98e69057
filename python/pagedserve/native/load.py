"""Loader of native models: from the engine's arguments to packed weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

from pagedserve._core.cpu import DecoderLayer, use_instructions
from pagedserve.config import EngineArgs
from pagedserve.config.precision import FILE_QUANTIZATIONS, Quantization
from pagedserve.errors import ConfigError, ModelLoadError, PagedServeError, UnsupportedModelError
from pagedserve.host_ops.threads import num_compute_threads
from pagedserve.models.families.record import LayerPart
from pagedserve.models.limits import check_max_model_len, eos_token_ids
from pagedserve.models.load.config_checks import check_config
from pagedserve.models.load.gguf_header import GgufHeader
from pagedserve.models.load.sources import ModelSource, find_source
from pagedserve.native.checkpoint import Checkpoint
from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.config import DecoderConfig
from pagedserve.native.families import UnsupportedError
from pagedserve.native.gguf_config import config_of_gguf
from pagedserve.native.gguf_file import read_gguf
from pagedserve.native.model import NativeLayer, NativeModel, Product
from pagedserve.native.model_config import decoder_config
from pagedserve.native.numbers import ComputeDtype, itemsize
from pagedserve.native.packing import Linear, Packer, Part
from pagedserve.native.pooling import as_generative, find_pooling, with_head
from pagedserve.pooling.rules import PoolingRules
from pagedserve.regular_files import is_file, read_json

# Gates and what they gate alternate in panels of this many features.
_GATE_FEATURES: Final = 32


@dataclass(frozen=True, slots=True)
class LoadedNative:
    """A model that is ready to run, with its limits.

    Attributes:
        model: The model.
        max_model_len: Maximum tokens of a sequence.
        eos_token_ids: Tokens that end a sequence.
        pooling: Pooling rules; None for a generative model.
    """

    model: NativeModel
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    pooling: PoolingRules | None


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's files, checked, of which only headers were read.

    Attributes:
        source: Location of the files.
        checkpoint: The weights.
        pooling: Pooling rules; None for a generative model.
        generation: Contents of ``generation_config.json``, as attributes.
        header: Header of a GGUF file.
    """

    source: ModelSource
    checkpoint: Checkpoint
    pooling: PoolingRules | None
    generation: SimpleNamespace
    header: GgufHeader | None

    @classmethod
    def of(cls, args: EngineArgs, source: ModelSource) -> Self:
        """Read the config and the headers of the weights."""
        gguf = read_gguf(source.path) if source.is_gguf else None
        if gguf is None:  # both files were checked when they were found
            content = _object(source.path / "config.json")
            generation = _object(source.path / "generation_config.json")
        else:
            content, generation = config_of_gguf(gguf), {}
            check_config(content)
        quantization = _kept_quantization(args, source, content)
        if quantization is not None:
            content = {name: content[name] for name in content if name != "quantization_config"}
        config = decoder_config(as_generative(content))
        pooling = find_pooling(content, source.path, args.runner)
        if pooling is not None:
            config = with_head(config, pooling)
        _check_sizes(config, compute_dtype(args))
        if gguf is None:
            checkpoint = Checkpoint.of_directory(args.model, source.path, config, quantization)
        else:
            checkpoint = Checkpoint.of_gguf(args.model, gguf, config)
        header = None if gguf is None else gguf.header
        return cls(source, checkpoint, pooling, SimpleNamespace(**generation), header)


def _kept_quantization(
    args: EngineArgs, source: ModelSource, content: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """``quantization_config`` of files whose numbers are kept; None for GGUF files and others.

    Raises:
        ConfigError: The option names another format than that of the files.
    """
    if args.quantization not in FILE_QUANTIZATIONS:
        return None
    fields: Mapping[str, Any] = content.get("quantization_config") or {}
    given = "gguf" if source.is_gguf else fields.get("quant_method")
    if given == args.quantization:
        return None if source.is_gguf else fields
    found = "is a GGUF file" if source.is_gguf else f"has quant_method {repr(given)[:80]}"
    if args.quantization == "gguf":
        found = "is no GGUF file"
    accepted = repr(given) if given in FILE_QUANTIZATIONS else "'int8', 'w8a8' or 'int4'"
    raise ConfigError(
        f"quantization is {args.quantization!r}, and model {args.model!r} {found}: give "
        f"{accepted}, or leave it out"
    )


def open_native(args: EngineArgs, source: ModelSource | None = None) -> OpenedModel:
    """Open a model's files, and check what they describe.

    Args:
        args: Options of the engine.
        source: Location of the files; None finds them, downloading them if necessary.

    Raises:
        ModelLoadError: The model does not exist, or its files are incomplete or damaged.
        UnsupportedModelError: Its architecture, or something in its config, is not supported.
    """
    source = find_source(args) if source is None else source
    with _named(args.model):
        return OpenedModel.of(args, source)


def compute_dtype(args: EngineArgs) -> ComputeDtype:
    """Dtype of weights, hidden states, keys and values."""
    return "float32" if args.dtype == "auto" else args.dtype


def load_native(args: EngineArgs, opened: OpenedModel | None = None) -> LoadedNative:
    """Load a model; see `pagedserve.native.choice` for the options that this supports.

    Args:
        args: Options of the engine.
        opened: Files of the model; None opens them.

    Raises:
        ModelLoadError: As `open_native`, or a weight is not finite.
        ConfigError: max_model_len exceeds that of the model, the heads do not fit the option
            ``kv_cache_dtype``, or the CPU lacks the instructions.
    """
    use_instructions(args.instructions)
    opened = open_native(args) if opened is None else opened
    config = opened.checkpoint.config
    args.check_head_size(config.head_size)
    with _named(args.model):
        max_model_len = check_max_model_len(
            args.max_model_len, config.max_positions, config.max_positions_reason
        )
        pooling = opened.pooling
        if pooling is not None and args.max_model_len is None:
            max_model_len = min(max_model_len, pooling.max_seq_length or max_model_len)
        eos = eos_token_ids(opened.generation, config, config.vocab_size)
        model = _pack(opened.checkpoint, config, compute_dtype(args), args.quantization)
    return LoadedNative(model, max_model_len, eos, pooling)


def _object(path: Path) -> dict[str, Any]:
    """Contents of a JSON file; empty without it."""
    found: Any = read_json(path) if is_file(path) else {}
    return dict(found)


@contextmanager
def _named(model: str) -> Iterator[None]:
    """A context whose errors name the model.

    Raises:
        UnsupportedModelError: What its files describe is not supported.
        ModelLoadError: Its files are damaged.
    """
    try:
        yield
    except PagedServeError:
        raise
    except UnsupportedError as error:
        raise UnsupportedModelError(f"model {model!r}: {error}") from error
    except ValueError as error:
        raise ModelLoadError(f"model {model!r}: {error}") from error
    except (ArithmeticError, TypeError) as error:
        raise ModelLoadError(
            f"model {model!r}: a field of its config has an invalid value: {error}"
        ) from error


def _check_sizes(config: DecoderConfig, dtype: ComputeDtype) -> None:
    """Refuse sizes that the kernels do not have.

    Raises:
        UnsupportedError: Names the size.
    """
    per_unit = 4 // itemsize(dtype)
    multiples = {
        "intermediate_size": (config.inner_size, _GATE_FEATURES),
        "head_dim": (config.head_size, 2),
        "hidden_size": (config.hidden_size, per_unit),
    }
    for name, (size, multiple) in multiples.items():
        if size % multiple or not size:
            raise UnsupportedError(
                f"{name} is {size}; the native backend has multiples of {multiple}: {OTHER_BACKEND}"
            )


def _pack(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: ComputeDtype,
    quantization: Quantization | None,
) -> NativeModel:
    """Pack all weights of a checked checkpoint."""
    names, num_threads = checkpoint.names, num_compute_threads()
    packer = Packer(checkpoint, dtype, num_threads)
    has_own_head = bool(config.head.num_outputs) and not config.head.is_tied
    # Blocks of a file are read at no loss; other weights are quantized where they are multiplied.
    quantizes_embedding = config.head.is_tied or quantization == "gguf"
    # Embedding and head lose more.
    of_ends: Quantization | None = "w8a8" if quantization == "int4" else quantization
    planned_embedding = packer.plan(
        Part(names.embedding), quantization=of_ends if quantizes_embedding else None
    )
    planned_head = planned_embedding
    if has_own_head:
        planned_head = packer.plan(Part(names.head), quantization=of_ends)
    packing = _LayerPacking(packer, config, quantization)
    layers = [packing.plan(layer) for layer in range(len(config.layers))]
    packer.log_converted(quantization)
    weight_bytes = packer.pack()
    embedding = packer.weights(planned_embedding)
    head = packer.weights(planned_head) if has_own_head else embedding
    return NativeModel(
        config,
        dtype,
        embedding=embedding,
        layers=[packing.packed(layer, planned) for layer, planned in enumerate(layers)],
        norm=checkpoint.norm(names.norm, dtype),
        head=head if config.head.num_outputs else None,
        num_threads=num_threads,
        weight_bytes=weight_bytes,
    )


@dataclass(frozen=True, slots=True)
class _LayerPacking:
    """Packs decoder layers."""

    packer: Packer
    config: DecoderConfig
    quantization: Quantization | None

    def plan(self, layer: int) -> dict[Product, Linear]:
        """Plan the linear layers of a decoder layer."""
        config, packer = self.config, self.packer
        names = packer.checkpoint.names

        def part(name: LayerPart, *, has_heads: bool = False) -> Part:
            return Part(names.of_layer(layer, name), has_heads)

        qkv = part("query", has_heads=True), part("key", has_heads=True), part("value")
        return {
            "qkv": packer.plan(*qkv, bias=self._qkv_bias(layer), quantization=self.quantization),
            "output": packer.plan(
                part("output"), bias=self._output_bias(layer), quantization=self.quantization
            ),
            "gate_up": packer.plan(
                part("gate"), part("up"), gate=config.family.gate, quantization=self.quantization
            ),
            "down": packer.plan(part("down"), quantization=self.quantization),
        }

    def packed(self, layer: int, planned: Mapping[Product, Linear]) -> NativeLayer:
        """Create a decoder layer whose linear layers are packed."""
        config, packer = self.config, self.packer
        checkpoint, dtype = packer.checkpoint, packer.dtype

        def norm(name: LayerPart, exists: bool) -> Any:
            if not exists:
                return None
            return checkpoint.norm(checkpoint.names.of_layer(layer, name), dtype)

        four, heads = config.family.has_output_norms, config.family.has_head_norms
        products = {name: packer.weights(linear) for name, linear in planned.items()}
        decoder = DecoderLayer(
            dtype=dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            epsilon=config.epsilon,
            scale=config.scale,
            softcap=config.score_softcap,
            attention_norm=norm("attention_norm", exists=True),
            attention_output_norm=norm("attention_output_norm", exists=four),
            mlp_norm=norm("mlp_norm", exists=True),
            mlp_output_norm=norm("mlp_output_norm", exists=four),
            query_norm=norm("query_norm", exists=heads),
            key_norm=norm("key_norm", exists=heads),
            **products,
        )
        return NativeLayer(decoder, products)

    def _qkv_bias(self, layer: int) -> list[Any]:
        if not self.config.has_qkv_bias:
            return []
        checkpoint, dtype = self.packer.checkpoint, self.packer.dtype
        query, key, value = (
            checkpoint.names.of_layer(layer, name, "bias") for name in ("query", "key", "value")
        )
        return [
            checkpoint.head_bias(query, dtype),
            checkpoint.head_bias(key, dtype),
            checkpoint.vector(value, dtype),
        ]

    def _output_bias(self, layer: int) -> list[Any]:
        if not self.config.has_output_bias:
            return []
        checkpoint = self.packer.checkpoint
        name = checkpoint.names.of_layer(layer, "output", "bias")
        return [checkpoint.vector(name, self.packer.dtype)]
