"""Model loader: from the engine's arguments to a model that passed the check of paged attention."""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.backends import choose_backend
from pagedserve.attention.interface import number_layers
from pagedserve.cache.layers import LayerShape
from pagedserve.cache.states import LayerStates
from pagedserve.collector import collector_paused
from pagedserve.config import EngineArgs
from pagedserve.config.precision import CpuKernels
from pagedserve.device import choose_device
from pagedserve.errors import ConfigError, PagedServeError
from pagedserve.host_ops.capabilities import use_instructions
from pagedserve.inputs.encoder_prompts import EncoderDecoder
from pagedserve.inputs.images import TEXT_ALONE
from pagedserve.models.attention_function import register
from pagedserve.models.check.first_layers import (
    config_of_first_layers,
    first_layers,
    num_first_layers,
)
from pagedserve.models.check.image_check import check_images, image_check_of
from pagedserve.models.check.numerics import TOLERANCE, NumericsCheck, compare, vocab_size
from pagedserve.models.check.probe import ProbeResult, check_replaced, probe_model
from pagedserve.models.check.probe_cache import ProbeCacheEntry
from pagedserve.models.classifiers import EncoderHead, with_class_head
from pagedserve.models.encoder_decoder import (
    check_encoder_decoder,
    encoder_decoder_of,
    reference_logits,
)
from pagedserve.models.encoders import check_encoder, reference_states
from pagedserve.models.families.prepare import prepare_model
from pagedserve.models.fused.choose import choose_kernels, replace_modules_of, with_fewer
from pagedserve.models.fused.cpu.replace import weight_bytes
from pagedserve.models.limits import check_max_model_len, derive_max_model_len, eos_token_ids
from pagedserve.models.load.files import (
    ModelFiles,
    find_model_files,
    foreign_errors_named,
    quiet_transformers,
)
from pagedserve.models.load.read import class_to_load, load_weights, make_up_weights, weights_read
from pagedserve.models.pooling import find_pooling, use_head
from pagedserve.parallel.group import RankGroup
from pagedserve.pooling.rules import PoolingRules

logger = logging.getLogger(__name__)

# Warning if a model runs without the kernels of its family.
_FEWER_KERNELS: Final = (
    "the %r kernels of %s in %s failed the numerics check at load, so %r ones run it, which may be "
    "several times slower: try another dtype, and please report it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run, with its properties.

    Attributes:
        model: model that runs on a flat ``[1, T]`` batch with our attention function.
        layers: KV shape of each attention call, in the order of the calls.
        vocab_size: rows of the embedding; token ids are below it.
        max_model_len: maximum tokens of a sequence.
        dtype: dtype of the weights, and of keys and values.
        device: device of the model.
        attention_backend: attention backend.
        weight_bytes: bytes of the weights; shared ones count once, unless one of them is packed.
        replaced_modules: numbers of replaced modules by type, as text.
        eos_token_ids: tokens that end a sequence.
        selects_logits: see `pagedserve.models.forward.flat_batch_logits`.
        states: shapes of recurrent states.
        pooling: pooling configuration, where the model returns states instead of logits; None for a
            generative model.
        is_encoder: whether attention is bidirectional, without a KV cache.
        image_token: placeholder of an image in a text; None if prompts may not have images.
        image_refusal: reason why they may not.
        head: classification head of an encoder: from pooled states to class logits.
        encoder_decoder: prompt format of an encoder-decoder; None for other models.
    """

    model: PreTrainedModel
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    attention_backend: AttentionBackend
    weight_bytes: int
    replaced_modules: str = "none"
    eos_token_ids: tuple[int, ...] = ()
    selects_logits: bool = True
    states: LayerStates = ()
    pooling: PoolingRules | None = None
    is_encoder: bool = False
    image_token: str | None = None
    image_refusal: str = TEXT_ALONE
    head: EncoderHead | None = None
    encoder_decoder: EncoderDecoder | None = None

    @property
    def stored_layers(self) -> tuple[LayerShape, ...]:
        """Layers with a separate pool: for an encoder one, shared by all."""
        if self.is_encoder:
            return self.layers[:1]
        return tuple(layer for layer in self.layers if not layer.is_cross)

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return len(self.layers)

    def describe_backends(self) -> str:
        """Describe the attention backend and the replaced modules in one line."""
        backend = self.attention_backend.describe()
        return f"attention: {backend}; replaced modules: {self.replaced_modules}"


def load_model(
    config: EngineArgs, device: torch.device | None = None, group: RankGroup | None = None
) -> LoadedModel:
    """Load a model and check that paged attention runs it.

    Args:
        config: options of the engine.
        device: device of the model; None is that of the options.
        group: ranks that share it; None loads the whole model.

    Raises:
        ModelLoadError: the model does not exist, or its files are incomplete.
        UnsupportedModelError: its architecture is not supported.
        ConfigError: max_model_len exceeds that of the model, the CPU lacks the instructions, the
            weights cannot be quantized, or the device does not exist.
    """
    device = device or choose_device(config.device)
    if group is not None and device.type == "cuda":
        device = torch.device("cuda", group.rank)
    if config.quantization is not None and device.type != "cpu":
        raise ConfigError(
            f"quantization is {config.quantization!r}, which is for the CPU; the model's device is "
            f"{device}: leave it out"
        )
    use_instructions(config.instructions)
    register()
    with collector_paused(), quiet_transformers(), foreign_errors_named(config.model):
        files = find_model_files(config)
        text_config = files.hf_config.get_text_config()
        pooling = find_pooling(config, files)
        rules = None if pooling is None else pooling.rules
        max_model_len = derive_max_model_len(text_config, config.max_model_len)
        if rules is not None and config.max_model_len is None:
            max_model_len = min(max_model_len, rules.max_seq_length or max_model_len)
        dtype = derive_dtype(config, files.hf_config, device)
        backend = choose_backend(config.attention_backend, device, dtype)
        backend.check_cache_dtype(config.kv_cache_dtype, device)
        loading = _Loading(files, config, dtype, device, backend, max_model_len, rules, group)
        if files.hf_config.is_encoder_decoder:
            return loading.load_encoder_decoder()
        if pooling is not None and pooling.is_encoder:
            return loading.load_encoder(pooling.rules)
        return loading.load_decoder()


@dataclass(frozen=True, slots=True)
class _Loading:
    """Parameters for loading a model, possibly several times."""

    files: ModelFiles
    config: EngineArgs
    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    max_model_len: int
    rules: PoolingRules | None
    group: RankGroup | None = None
    reference: PreTrainedConfig | None = None  # of a part of the model, as a reference of shards

    @property
    def names_classes(self) -> bool:
        """Whether the model is a classifier."""
        return self.rules is not None and self.rules.classes is not None

    def load(self) -> PreTrainedModel:
        """Load the model with its original modules and our attention function."""
        model = self.read(class_to_load(self.files.hf_config, self.rules))
        if self.names_classes:
            model = with_class_head(model)
        prepare_model(model, self.max_model_len)
        return model

    def read(self, auto_class: Any) -> PreTrainedModel:
        """Load the model from its files, unchanged."""
        if self.config.load_format == "dummy":
            model = make_up_weights(
                auto_class, self.files, self.dtype, self.device, seed=self.config.seed
            )
        else:
            with weights_read() if self.device.type == "cpu" else nullcontext():
                model = load_weights(
                    auto_class,
                    self.files,
                    self.dtype,
                    self.config.load_format,
                    self.group,
                    quantizes=self.config.quantization is not None,
                    needs_head=self.rules is None or self.names_classes,
                    config=self.reference,
                )
        cast(nn.Module, model).to(self.device).eval()
        return model

    def load_decoder(self) -> LoadedModel:
        """Load a decoder, check it unless it passed before, and replace modules.

        Raises:
            UnsupportedModelError: Its logits differ from those of its original attention.
            ConfigError: max_model_len exceeds what its attention computes exactly.
        """
        config, max_model_len, group = self.config, self.max_model_len, self.group
        kernels = choose_kernels(config, self.device, self.backend)
        cached = ProbeCacheEntry.of(self.files.directory, *self._how(kernels))
        probed = cached.load() if group is None else group.from_first(cached.load)
        if probed is None:
            model, probed, replaced_modules = self.try_modules(kernels)
            if group is None or group.rank == 0:
                cached.save(probed)
        else:
            model = self.load()
            replaced_modules = self.replace(model, probed, probed.kernels)
        if probed.kernels != kernels:
            dtype = str(self.dtype)[6:]
            logger.warning(_FEWER_KERNELS, kernels, config.model, dtype, probed.kernels)
        if self.rules is not None:
            head = model.get_output_embeddings() if self.names_classes else nn.Identity()
            use_head(model, probed, self.backend, head)
        return self._loaded(
            model,
            probed.layers,
            vocab_size=probed.vocab_size,
            max_model_len=check_max_model_len(
                max_model_len if config.max_model_len else None,
                min(max_model_len, probed.max_exact_len),
                "the length of the chunks that its attention is cut into",
            ),
            replaced_modules=replaced_modules,
            selects_logits=probed.selects_logits,
            states=probed.states,
            image_token=probed.image_token,
            image_refusal=probed.image_refusal,
        )

    def _how(self, kernels: CpuKernels) -> Iterator[object]:
        """Everything that the result of a check depends on, besides the files."""
        yield from (self.dtype, self.device, self.backend.describe(), self.max_model_len, kernels)
        yield self.config.quantization
        if self.names_classes:
            yield "classes"
        if self.group is not None:
            yield f"{self.group.size} ranks"

    def _loaded(
        self,
        model: PreTrainedModel,
        layers: tuple[LayerShape, ...],
        *,
        vocab_size: int,
        **properties: Any,
    ) -> LoadedModel:
        """The model with its properties, of which those of its kind are given."""
        if "is_encoder" not in properties:
            properties["eos_token_ids"] = eos_token_ids(
                model.generation_config, self.files.hf_config.get_text_config(), vocab_size
            )
        properties.setdefault("max_model_len", self.max_model_len)
        properties.setdefault("weight_bytes", weight_bytes(model))
        return LoadedModel(
            model=model,
            layers=layers,
            vocab_size=vocab_size,
            dtype=self.dtype,
            device=self.device,
            attention_backend=self.backend,
            pooling=self.rules,
            **properties,
        )

    def load_encoder(self, rules: PoolingRules) -> LoadedModel:
        """Load and check an encoder with its original modules.

        Raises:
            UnsupportedModelError: its states differ from those of its original attention.
            ConfigError: modules are to be replaced.
        """
        self._keep_modules("an encoder")
        whole = self.read(self._encoder_class)
        num_bytes = weight_bytes(whole)
        head = EncoderHead(whole, self.max_model_len) if self.names_classes else None
        model = whole if head is None else head.encoder
        prepare_model(model, self.max_model_len)
        layers = check_encoder(model, max_model_len=self.max_model_len, backend=self.backend)
        states = partial(reference_states, max_model_len=self.max_model_len)
        self._check_shards(model, states, _Loading.load_bare_encoder)
        if head is not None:
            head.check(layers, self.backend, rules.pooling_type)
        return self._loaded(
            model,
            layers,
            vocab_size=vocab_size(model),
            weight_bytes=num_bytes,
            is_encoder=True,
            head=head,
        )

    def load_encoder_decoder(self) -> LoadedModel:
        """Load and check an encoder-decoder with its original modules.

        Raises:
            UnsupportedModelError: its logits differ from those of its original attention, or it is
                a pooling model.
            ConfigError: modules are to be replaced, or the device is not the CPU.
        """
        self._keep_modules("an encoder-decoder")
        if self.device.type != "cpu":
            raise ConfigError(
                f"device is {self.device}, and encoder-decoders run on the CPU alone so far: give "
                "device='cpu'"
            )
        model = self.load()
        layers = check_encoder_decoder(model, self.backend)
        self._check_shards(model, reference_logits, _Loading.load)
        return self._loaded(
            model,
            layers,
            vocab_size=vocab_size(model),
            selects_logits=False,
            encoder_decoder=encoder_decoder_of(model, self.config),
        )

    @property
    def _encoder_class(self) -> Any:
        return class_to_load(self.files.hf_config, self.rules, is_encoder=True)

    def load_bare_encoder(self) -> PreTrainedModel:
        """Load an encoder without the head of a classifier."""
        whole: Any = self.read(self._encoder_class)
        model: PreTrainedModel = whole.base_model if self.names_classes else whole
        prepare_model(model, self.max_model_len)
        return model

    def _check_shards(
        self,
        model: PreTrainedModel,
        results: Callable[[PreTrainedModel], list[Tensor]],
        load: "Callable[[_Loading], PreTrainedModel]",
    ) -> None:
        """Compare results of a sharded model with those of the whole one; see `_whole`.

        Raises:
            UnsupportedModelError: they differ.
        """
        if self.group is None:
            return
        found = results(model)

        def check() -> None:
            differ = f"shared by {self.config.tensor_parallel_size} ranks its results differ"
            expected = results(load(self._whole))
            compare(model, found, expected, TOLERANCE[self.dtype], differ)

        self.group.from_first(check)

    @property
    def _whole(self) -> "_Loading":
        """Parameters for loading the whole model in this process, as a reference of shards."""
        return replace(self, group=None, device=torch.device("cpu"))

    def _keep_modules(self, what: str) -> None:
        for name in ("quantization", "cpu_kernels"):
            value = getattr(self.config, name)
            if value not in (None, "generic"):
                raise ConfigError(f"{name} is {value!r}, and {what} keeps its own modules")

    def replace(self, model: PreTrainedModel, probed: ProbeResult, kernels: CpuKernels) -> str:
        """Number the layers that a probe found, and replace modules; returns a description."""
        number_layers(model, probed.modules)
        return replace_modules_of(model, self.config, self.backend, kernels, self.group)

    def try_modules(self, kernels: CpuKernels) -> tuple[PreTrainedModel, ProbeResult, str]:
        """Probe the model, replace modules, and check it again.

        Replacement is irreversible, so a model that fails is loaded again with fewer replacements.

        Raises:
            UnsupportedModelError: the model fails with its original modules, or with every choice
                of quantized ones.
        """
        model = self.load()
        probe = probe_model(model, max_model_len=self.max_model_len, backend=self.backend)
        if self.group is not None:
            self._compare_with_whole(model, probe.numerics, self.group)
        images = image_check_of(model, self.config, probe, self.max_model_len)
        while kernels != "generic":
            replaced = self.replace(model, probe.result, kernels)
            try:
                check_replaced(model, probe, self.config.quantization)
            except PagedServeError:
                fewer = with_fewer(kernels, self.config)
                if fewer is None:
                    raise
                kernels = fewer
            else:
                break
            del model
            model = self.load()
        else:
            replaced = self.replace(model, probe.result, kernels)
        result = check_images(model, images, probe, self.config.quantization)
        return model, replace(result, kernels=kernels), replaced

    def _compare_with_whole(
        self, model: PreTrainedModel, numerics: NumericsCheck, group: RankGroup
    ) -> None:
        """Compare the logits of a sharded model with those of the whole model.

        Incorrect shards agree with each other, so no other check would detect them.  Rank 0 reads
        the first layers of the whole model, or all of it if they are too different.

        Raises:
            UnsupportedModelError: they differ.
        """
        differ = f"shared by {group.size} ranks its logits differ"
        number, expected = num_first_layers(model), None
        if number is not None:
            with first_layers(model, number):
                expected = numerics.own_logits(model)

        def compare_on_first() -> None:
            whole = None if number is None else self._load_first_layers(number)
            if whole is None:
                numerics.compare_with(self._whole.load(), differ)
            else:
                numerics.compare_with(whole, differ, expected)

        group.from_first(compare_on_first)

    def _load_first_layers(self, number: int) -> PreTrainedModel | None:
        """Load the first layers of the whole model; None if their config is not valid."""
        config = config_of_first_layers(self.files.hf_config, number)
        try:
            return replace(self._whole, reference=config).load()
        except PagedServeError:
            return None


def derive_dtype(
    config: EngineArgs, hf_config: PreTrainedConfig, device: torch.device
) -> torch.dtype:
    """The dtype in which a model is loaded.

    Args:
        config: options of the engine.
        hf_config: config of the whole model; that of its text part need not repeat the dtype.
        device: device of the model.
    """
    if config.dtype != "auto":
        return cast(torch.dtype, getattr(torch, config.dtype))
    # On the CPU, torch's half precision is slower and less exact than float32.
    saved = getattr(hf_config.get_text_config(), "dtype", None) or getattr(hf_config, "dtype", None)
    return saved if device.type != "cpu" and isinstance(saved, torch.dtype) else torch.float32
