"""Tiny models with random adapters of peft's making, and what peft computes of them alone."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.cache.engine import CacheEngine
from pagedserve.lora.apply import AdapterModules
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import StepInputs
from pagedserve.runner.model_runner import Forward
from tests.support.tiny import enlarge_weights


def save_random_model(directory: Path, config: dict[str, Any]) -> Path:
    """A causal model with weights so large that a small change shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    enlarge_weights(model, "bias")
    model.save_pretrained(directory)
    return directory


class PeftOracle:
    """A model of transformers with adapters of peft, unmerged, one at a time."""

    def __init__(self, model: Any, configs: Sequence[LoraConfig]) -> None:
        torch.manual_seed(1)
        with warnings.catch_warnings():
            # It warns of merging, which nobody does here.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            self.model: Any = get_peft_model(model, configs[0], adapter_name="0")
            for index, config in enumerate(configs[1:], start=1):
                self.model.add_adapter(str(index), config)
        self.model.eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.2)

    def weights(self, adapter: int) -> dict[str, LoraWeights]:
        """Of an adapter, by the names of the model without peft."""
        name, found = str(adapter), {}
        for path, layer in self.model.base_model.model.named_modules():
            if name in getattr(layer, "lora_A", {}):
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            elif name in getattr(layer, "lora_embedding_A", {}):
                a, b = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
            else:
                continue
            pair = a.detach(), b.detach() * layer.scaling[name]
            found[path] = LoraWeights(*(part.float().contiguous().numpy() for part in pair))
        return found

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, adapter: int | None) -> Tensor:
        """``[T, V]`` of one sequence with one adapter, or with none."""
        if adapter is None:
            with self.model.disable_adapter():
                output = self.model(token_ids[None])
        else:
            self.model.set_adapter(str(adapter))
            output = self.model(token_ids[None])
        return cast(Tensor, output.logits[0])


class MixedBatch:
    """Sequences with an adapter each, run together over paged KV."""

    def __init__(
        self,
        loaded: LoadedModel,
        modules: AdapterModules,
        sequences: Sequence[Tensor],
        slots: Sequence[int],
    ) -> None:
        self._modules = modules
        self._sequences = sequences
        self._slots = np.array(slots, dtype=np.int32)
        self._block_size = loaded.attention_backend.min_block_size
        self._num_blocks = -(-max(map(len, sequences)) // self._block_size)
        cache = CacheEngine(
            loaded.layers,
            num_gpu_blocks=len(sequences) * self._num_blocks,
            num_cpu_blocks=0,
            block_size=self._block_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._device = loaded.device
        self._forward = Forward(loaded, cache)

    @torch.inference_mode()
    def prompt_logits(self) -> list[Tensor]:
        """Of all tokens but the last of each sequence, ``[T - 1, V]``."""
        lengths = [len(sequence) - 1 for sequence in self._sequences]
        inputs = self._inputs([(0, length) for length in lengths])
        rows = AdapterRows(np.repeat(self._slots, lengths), self._device)
        logits = self._forward(inputs, adapters=self._modules.of_step(rows))
        return list(logits.split(lengths))

    @torch.inference_mode()
    def last_logits(self) -> Tensor:
        """Of the last token of every second sequence, ``[R / 2, V]``, after `prompt_logits`."""
        inputs = self._inputs([(len(tokens) - 1, len(tokens)) for tokens in self._sequences])
        index = torch.arange(0, len(self._sequences), 2, dtype=torch.int32)
        rows = [AdapterRows(slots, self._device) for slots in (self._slots, self._slots[::2])]
        adapters = self._modules.of_step(*rows)
        return self._forward(inputs, index.to(self._device), adapters=adapters)

    def _inputs(self, spans: Sequence[tuple[int, int]]) -> StepInputs:
        positions = [np.arange(*span) for span in spans]
        tables = np.arange(len(spans) * self._num_blocks, dtype=np.int32).reshape(len(spans), -1)
        first_slots = tables[:, :1].astype(np.int64) * self._block_size
        layout = BatchLayout(
            query_start=np.cumsum([0, *map(len, positions)]).astype(np.int32),
            seq_lens=np.array([end for _, end in spans], dtype=np.int32),
            block_tables=tables,
            block_size=self._block_size,
        )
        slots = np.concatenate(
            [first + own for first, own in zip(first_slots, positions, strict=True)]
        )
        tokens = [tokens[slice(*span)] for tokens, span in zip(self._sequences, spans, strict=True)]
        device = self._device
        return StepInputs(
            token_ids=torch.cat(tokens).int()[None].to(device),
            positions=torch.from_numpy(np.concatenate(positions))[None].to(device),
            sample_index=torch.zeros(0, dtype=torch.int32, device=device),
            metadata=AttentionMetadata(layout, torch.from_numpy(slots).to(device)),
        )
