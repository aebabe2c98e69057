"""Adapters read from peft's files are those that peft itself would apply."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from pagedserve.errors import RequestError
from pagedserve.lora.adapter import CONFIG, WEIGHTS, AdapterFiles
from pagedserve.lora.weights import LoraWeights
from tests.support.irregular_files import IRREGULAR, make_irregular
from tests.support.lora import KINDS, load_adapter, save_random_adapter


@pytest.fixture(scope="module")
def shapes(base: PreTrainedModel) -> dict[str, tuple[int, int]]:
    found = {}
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = (module.in_features, module.out_features)
        elif isinstance(module, nn.Embedding):
            found[name] = (module.num_embeddings, module.embedding_dim)
    return found


Parse = Callable[[Path], dict[str, LoraWeights]]


@pytest.fixture
def parse(shapes: dict[str, tuple[int, int]]) -> Parse:
    return lambda path: AdapterFiles.read("a", str(path)).parse(shapes, max_rank=64)


@pytest.fixture
def saved(base: PreTrainedModel, tmp_path: Path) -> Path:
    """An adapter of queries and values whose files a test may change."""
    return save_random_adapter(base, "query and value", tmp_path / "adapter")


@pytest.mark.parametrize("kind", KINDS)
def test_the_change_of_each_weight_is_the_one_that_peft_makes(
    base: PreTrainedModel, kind: str, parse: Parse, tmp_path: Path
) -> None:
    model = load_adapter(base, save_random_adapter(base, kind, tmp_path))
    expected = {
        name.removeprefix("base_model.model."): cast(Any, module)
        .get_delta_weight("default")
        .double()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    found = parse(tmp_path)
    assert found.keys() == expected.keys()
    for name, (a, b) in found.items():
        delta = torch.from_numpy(b).double() @ torch.from_numpy(a).double()
        if isinstance(base.get_submodule(name), nn.Embedding):
            delta = delta.T
        torch.testing.assert_close(delta, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(saved: Path, parse: Parse, dtype: torch.dtype) -> None:
    halves = {key: tensor.to(dtype) for key, tensor in load_file(saved / WEIGHTS).items()}
    save_file(halves, saved / WEIGHTS)
    for name, (a, _) in parse(saved).items():
        assert a.dtype == np.float32
        half = halves[f"base_model.model.{name}.lora_A.weight"]
        assert torch.equal(torch.from_numpy(a), half.float())


def change_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; it must be 'LORA'"),
        ({"use_dora": True}, "use_dora is True, which is not supported: DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; it must be 'none'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16', which changes the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens is \[5\]"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is"),
        ({"target_parameters": ["mlp.experts.down"]}, "target_parameters is"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"trainable_token_indices": [7]}, r"trainable_token_indices is \[7\]"),
        ({"use_qalora": True}, "use_qalora is True, which is not supported: it is not known here"),
        ({"r": 8}, "has rank 4; adapter_config.json says 8"),
        ({"r": "4"}, "r is '4'; it must be a number above 0"),
        ({"lora_alpha": None}, "lora_alpha is None; it must be a number above 0"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .* must be an object"),
        ({"alpha_pattern": {"(": 3}}, r"alpha_pattern has '\(', which is no regular expression"),
        ({"rank_pattern": {r"(q)\1": 4}}, "rank_pattern has .* with groupref; accepted is a name"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern of 'q_proj' is '4'; it must be a number"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; it must be true or false"),
        ({"r": 0}, "r is 0; it must be a number above 0"),
        ({"r": -1}, "r is -1; it must be a number above 0"),
        ({"r": True}, "r is True; it must be a number above 0"),
        ({"r": 10**9}, "has rank 4; adapter_config.json says 1000000000"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; it must be a number above 0"),
        ({"lora_alpha": 10**400}, r"lora_alpha is 1000*\.\.\.; it must be a number above 0"),
        ({"lora_alpha": 1e300}, r"times lora_alpha / r = 2.5e\+299 are infinite"),
        ({"modules_to_save": ["a" * 10**6]}, r"modules_to_save is \['a{198}\.\.\., which is not"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    saved: Path, parse: Parse, fields: dict[str, Any], said: str
) -> None:
    change_config(saved, **fields)
    with pytest.raises(RequestError, match=f"adapter 'a': .*{said}"):
        parse(saved)


def test_a_rank_above_the_limit_is_refused(
    base: PreTrainedModel, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    save_random_adapter(base, "all-linear", tmp_path)
    with pytest.raises(RequestError, match="has rank 16; max_lora_rank is 8"):
        AdapterFiles.read("a", str(tmp_path)).parse(shapes, max_rank=8)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{Q}.lora_A.weight": None}, "has one of lora_A and lora_B of .*q_proj' alone"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 63)}, r"lora_A .* is \(4, 63\) and lora_B \(64, 4\)"),
        ({f"{Q}.lora_A.weight": torch.full((4, 64), float("nan"))}, "are not all finite numbers"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64).long()}, "q_proj.* is of I64; accepted are F32"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64).to(torch.complex64)}, "is of C64"),
        ({f"{Q}.lora_A.weight": torch.ones(())}, r"lora_A .* is \(\)"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector', which is no"),
        ({f"{Q}.lora_B.bias": torch.ones(64)}, "lora_B.bias', which is no low-rank change"),
        (
            {f"{Q.replace('q_proj', 'query')}.lora_A.weight": torch.ones(4, 64)},
            "the model has no 'model.layers.0.self_attn.query' .* it has down_proj, embed_tokens, ",
        ),
        (
            {"base_model.model.lm_head.base_layer.weight": torch.ones(99, 64)},
            r"base_layer.weight' is \(99, 64\); the model has \(64, 97\): the vocabulary was",
        ),
    ],
)
def test_weights_that_are_no_change_of_this_model_are_refused(
    saved: Path, parse: Parse, change: dict[str, torch.Tensor | None], said: str
) -> None:
    tensors = load_file(saved / WEIGHTS) | change
    save_file(
        {key: tensor for key, tensor in tensors.items() if tensor is not None}, saved / WEIGHTS
    )
    with pytest.raises(RequestError, match=said):
        parse(saved)


def test_a_directory_that_is_no_adapter_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is no directory with an adapter_config"):
        AdapterFiles.read("a", str(tmp_path / "nowhere"))
    with pytest.raises(RequestError, match="is no directory with an adapter_config"):
        AdapterFiles.read("a", str(saved / CONFIG))
    (saved / WEIGHTS).rename(saved / "weights")
    with pytest.raises(RequestError, match=f"has no {WEIGHTS}"):
        AdapterFiles.read("a", str(saved))
    (saved / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(RequestError, match=r"adapter_model.bin is not read, only safetensors"):
        AdapterFiles.read("a", str(saved))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (CONFIG, b"{", "adapter_config.json is no JSON"),
        (CONFIG, b"[1]", "adapter_config.json is no JSON object"),
        (CONFIG, b"\xff\xfe\xfd", "adapter_config.json is no JSON"),
        (CONFIG, b"[" * 10**5 + b"]" * 10**5, "adapter_config.json is nested deeper than 100"),
        (CONFIG, b'{"a":' * 200 + b"1" + b"}" * 200, "adapter_config.json is nested deeper than"),
        (CONFIG, b'{"r": ' + b"1" * 5000 + b"}", "adapter_config.json is no JSON"),
        (CONFIG, b" " * (17 << 20), "adapter_config.json has 17825792 bytes; accepted are at most"),
        (WEIGHTS, b"", "adapter_model.safetensors cannot be read"),
        (WEIGHTS, (10**15).to_bytes(8, "little") + b"{}", f"{WEIGHTS} cannot be read"),
        (WEIGHTS, (2).to_bytes(8, "little") + b"{}", "has no lora_A and lora_B of any module"),
        (WEIGHTS, b"no tensors", "adapter_model.safetensors cannot be read"),
    ],
)
def test_a_broken_file_is_refused(
    saved: Path, parse: Parse, name: str, content: bytes, said: str
) -> None:
    (saved / name).write_bytes(content)
    with pytest.raises(RequestError, match=said):
        parse(saved)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_catastrophic_pattern_does_not_hold_the_process(
    saved: Path, parse: Parse, field: str
) -> None:
    expected = parse(saved)
    change_config(saved, **{field: {r"(([\w.]+)+)+x": 4, "(a|a)" * 100: 4}})
    found = parse(saved)
    assert all(np.array_equal(found[name].b, expected[name].b) for name in expected)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "layers_pattern"])
def test_patterns_of_training_are_not_matched(saved: Path, parse: Parse, field: str) -> None:
    change_config(saved, **{field: r"(([\w.]+)+)+x"})
    assert len(parse(saved)) == 4


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}, "cannot be read"),
        ({"a": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 16]}}, "cannot be read"),
        (
            {
                "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
            },
            "cannot be read",
        ),
        ({"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, "cannot be read"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "'a', which is no low"),
        ([1], "cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(saved: Path, parse: Parse, header: Any, said: str) -> None:
    text = json.dumps(header).encode()
    (saved / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(RequestError, match=said):
        parse(saved)


def test_a_path_that_none_can_be_is_refused() -> None:
    for path, said in (
        ("/a\0b", "its path has a NUL character"),
        ("/" + "a" * 5000, "its path has 5001 characters; accepted are paths of at most 4096"),
        ("~no-such-user/a", "its path begins with the home directory of a user that is unknown"),
        ("/" + "a" * 4000, "is no directory with an adapter_config"),
    ):
        with pytest.raises(RequestError, match=said):
            AdapterFiles.read("a", path)


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    saved: Path, file: str, kind: str
) -> None:
    make_irregular(saved / file, kind)
    with pytest.raises(RequestError, match=f"is no directory with an {CONFIG}|has no {WEIGHTS}"):
        AdapterFiles.read("a", str(saved))


def test_more_bytes_than_the_model_can_have_changes_of_are_not_read(saved: Path) -> None:
    with (saved / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 40)  # a hole
    with pytest.raises(RequestError, match=f"{WEIGHTS} has 1099511627776 bytes; .* at most 1000"):
        AdapterFiles.read("a", str(saved), 1000)


def test_a_cut_file_is_refused(saved: Path, parse: Parse) -> None:
    whole = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match="cannot be read"):
        parse(saved)


def test_the_digest_is_of_the_contents_alone(saved: Path, tmp_path: Path) -> None:
    digest = AdapterFiles.read("a", str(saved)).digest
    copied = shutil.copytree(saved, tmp_path / "copy")
    assert AdapterFiles.read("b", str(copied)).digest == digest
    change_config(copied, lora_alpha=17)
    assert AdapterFiles.read("b", str(copied)).digest != digest
