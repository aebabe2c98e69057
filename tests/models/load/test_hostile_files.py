"""Files of a model that somebody sent: what cannot be is refused by name, before it is built."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError
from pagedserve.models.load.checkpoint_checks import checked_loading
from pagedserve.models.load.config_checks import check_config
from pagedserve.models.loader import LoadedModel, load_model
from tests.support.irregular_files import IRREGULAR, make_irregular

SaveTiny = Callable[..., Path]
WEIGHTS = "model.safetensors"
Q = "model.layers.1.self_attn.q_proj.weight"


def load(model: Path | str, **options: Any) -> LoadedModel:
    return load_model(EngineArgs(model=str(model), **options), torch.device("cpu"))


def change_json(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | fields))


@pytest.fixture
def saved(save_tiny: SaveTiny) -> Path:
    return save_tiny("llama")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer from 1 to"),
        (
            {"num_attention_heads": 7},
            "num_key_value_heads is 2; it must divide num_attention_heads",
        ),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7},
            r"hidden size \(32\) is not a multiple of the number of attention heads \(7\)",
        ),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'; it must be an integer"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be an integer from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number from 0 to below"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a number from 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number"),
        ({"architectures": 5}, "architectures is 5; it must be a list of names"),
        ({"architectures": [5]}, r"architectures is \[5\]; it must be a list of names"),
        ({"model_type": 5}, "model_type is 5; it must be a name"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; it must be an integer from",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer from 1 to 4096"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be an integer from 1"),
        ({"hidden_size": -32}, "hidden_size is -32; it must be an integer from 1"),
        ({"hidden_size": 33}, r"hidden size \(33\) is not a multiple"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000; it must be an integer from 1"),
        ({"hidden_size": 32.5}, "hidden_size is 32.5"),
        ({"head_dim": 9}, "even rotary dimension, but got `head_dim`=9"),
        ({"head_dim": -8}, "head_dim is -8; it must be an integer from 0"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be an integer from 1"),
        ({"vocab_size": "97"}, "vocab_size is '97'"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'; .* or -1"),
        ({"rope_theta": 0}, "rope_theta is 0; it must be a finite number above 0"),
        ({"rope_theta": -1e4}, "rope_theta is -10000.0; it must be a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; it must be a finite number"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; it must be a finite number"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            "rope_parameters.rope_theta is 0",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
            "rope_scaling.factor is nan; it must be a finite number above 0",
        ),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method is 'magic'; .* one of "),
        ({"quantization_config": {}}, "quant_method is None; it must be one of"),
        ({"quantization_config": 4}, "quantization_config is 4; it must be an object"),
        ({"hidden_act": 5}, "config.json|cannot be loaded|its own modules fail"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        (
            {"eos_token_id": 97},
            "eos_token_id of .*config.json is 97; the model's tokens are 0 to 96",
        ),
        ({"eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_the_field(
    saved: Path, load_format: Any, fields: dict[str, Any], said: str
) -> None:
    (saved / "generation_config.json").unlink()
    config = json.loads((saved / "config.json").read_text())
    if "rope_theta" in fields or "rope_scaling" in fields:
        del config["rope_parameters"]  # older spellings
    (saved / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelLoadError, match=said) as caught:
        load(saved, load_format=load_format)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("options", "fields", "said"),
    [
        (
            {},
            {"num_attention_heads": 12},
            r"is \(32, 32\) in its files, .* \(24, 32\)|o_proj.* \(32, 24\)|k_proj.* \(4, 32\)",
        ),
        ({"head_dim": 8}, {"head_dim": 7}, "head_dim.* 7|`head_dim`=7"),
        ({"head_dim": 8}, {"head_dim": 16}, r"is \(16, 32\) in its files, .* \(32, 32\)"),
    ],
)
def test_heads_that_do_not_fit_are_refused_of_a_class_that_checks_nothing(
    save_tiny: SaveTiny, options: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    directory = save_tiny("mistral", **options)
    change_json(directory / "config.json", **fields)
    if "num_attention_heads" in fields:
        content = json.loads((directory / "config.json").read_text())
        del content["head_dim"]
        (directory / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=said):
        load(directory)


@pytest.mark.parametrize(("heads", "key_heads"), [(16, 0), (16, -1), (-1, 5), (0, 5)])
def test_a_part_may_say_that_it_has_no_heads(heads: int, key_heads: int) -> None:
    fields = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    check_config({"vision_config": fields})


def test_a_config_of_a_part_is_checked_too(saved: Path) -> None:
    change_json(saved / "config.json", text_config={"num_hidden_layers": -2})
    with pytest.raises(ModelLoadError, match=r"text_config\.num_hidden_layers is -2"):
        load(saved)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 10**5, "config.json is nested deeper than 100 levels"),
        ('{"a":' * 10**5 + "1" + "}" * 10**5, "config.json is nested deeper than 100 levels"),
        ("[]", "names no model_type"),
        ("", "config.json is no JSON"),
        (" " * (17 << 20), "config.json has 17825792 bytes; accepted are at most 16777216"),
    ],
)
def test_a_config_that_is_no_config_is_refused(saved: Path, content: str, said: str) -> None:
    (saved / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=said):
        load(saved)


def test_a_dummy_model_larger_than_the_machine_is_not_begun(saved: Path) -> None:
    change_json(saved / "config.json", hidden_size=1 << 20, num_hidden_layers=64)
    with pytest.raises(ModelLoadError, match=r"describes weights of .* MiB of memory"):
        load(saved, load_format="dummy")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (97, "generation_config.json is 97; the model's tokens are 0 to 96"),
        (-1, "generation_config.json is -1; the model's tokens are 0 to 96"),
        ([98, 99], r"is \[98, 99\]; the model's tokens"),
        ("2", "eos_token_id of generation_config.json is '2'; it must be a token|eos_token_id"),
        ([[2]], "eos_token_id"),
        (2.5, "eos_token_id"),
    ],
)
def test_an_end_token_that_is_none_is_refused(saved: Path, given: Any, said: str) -> None:
    change_json(saved / "generation_config.json", eos_token_id=given)
    with pytest.raises(ModelLoadError, match=said):
        load(saved)


def test_of_several_end_tokens_those_beyond_the_vocabulary_are_left_out(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_json(saved / "generation_config.json", eos_token_id=[5, 151645])
    assert load(saved).eos_token_ids == (5,)
    assert "151645" in caplog.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"eos_token_id": {}', "generation_config.json is no JSON"),
        ("[1]", "generation_config.json is no JSON object"),
        ("[" * 10**5, "generation_config.json is nested deeper than 100 levels"),
    ],
)
def test_a_damaged_generation_config_is_refused(saved: Path, content: str, said: str) -> None:
    (saved / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=said):
        load(saved)


def change_weights(directory: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(directory / WEIGHTS) | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight.long(), f"its files have '{Q}' as I64, which is no floating-point"),
        (lambda weight: weight.to(torch.int8), f"'{Q}' as I8, which is no floating-point type"),
        (lambda weight: weight > 0, f"'{Q}' as BOOL, which is no floating-point type"),
        (
            lambda weight: weight * float("nan"),
            f"1024 of the 1024 numbers of '{Q}' are infinite or",
        ),
        (lambda weight: weight / 0, f"numbers of '{Q}' are infinite or no numbers"),
        (lambda weight: weight[:-1], rf"'{Q}' is \(31, 32\) in its files, .* makes it \(32, 32\)"),
        (lambda weight: weight[0, 0], rf"'{Q}' is \(\) in its files"),
        (lambda _: None, f"its files lack 1 of the model's weights, the first is '{Q}'"),
    ],
)
def test_a_weight_that_cannot_be_is_refused_by_its_name(
    saved: Path, change: Callable[[Any], Any], said: str
) -> None:
    change_weights(saved, **{Q: change(load_file(saved / WEIGHTS)[Q])})
    with pytest.raises(ModelLoadError, match=said) as caught:
        load(saved)
    assert "above report" not in str(caught.value)
    assert "architecture" not in str(caught.value)


def test_weights_of_integers_in_a_shard_are_refused(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors[Q] = tensors[Q].long()
    (saved / WEIGHTS).unlink()
    save_file(tensors, saved / "part.safetensors", metadata={"format": "pt"})
    (saved / "stray.safetensors").write_bytes(b"half of a file")
    weight_map = dict.fromkeys(tensors, "part.safetensors")
    change_json(saved / "model.safetensors.index.json", weight_map=weight_map, metadata={})
    with pytest.raises(ModelLoadError, match=f"its files have '{Q}' as I64"):
        load(saved)


def test_weights_of_integers_in_a_pickle_are_refused(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors[Q] = tensors[Q].long()
    (saved / WEIGHTS).unlink()
    torch.save(tensors, saved / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=f"its files have '{Q}' as int64"):
        load(saved)


def test_one_number_that_is_none_in_a_row_that_no_check_reads_is_found(saved: Path) -> None:
    weight = load_file(saved / WEIGHTS)["model.embed_tokens.weight"]
    weight[96, 5] = float("nan")
    change_weights(saved, **{"model.embed_tokens.weight": weight})
    with pytest.raises(
        ModelLoadError, match=r"1 of the 3104 numbers of 'model\.embed_tokens\.weight'"
    ):
        load(saved)


def test_large_finite_weights_are_taken(saved: Path) -> None:
    weight = load_file(saved / WEIGHTS)["model.embed_tokens.weight"]
    weight[5:9] = 3e38  # the sum is infinite, no number is
    change_weights(saved, **{"model.embed_tokens.weight": weight})
    assert load(saved).num_layers == 2


def test_masks_of_integers_are_no_weights(saved: Path) -> None:
    name = "model.layers.0.self_attn.bias"
    change_weights(saved, **{name: torch.ones(4, 4).to(torch.uint8)})
    assert load(saved).num_layers == 2


def test_loads_in_two_threads_leave_the_class_of_transformers_as_it_was() -> None:
    own = PreTrainedModel._finalize_model_loading
    begun, goes_on = Event(), Event()

    def first() -> None:
        with checked_loading("a", ()):
            begun.set()
            goes_on.wait()

    def second() -> None:
        goes_on.set()
        with checked_loading("b", ()):
            pass

    with ThreadPoolExecutor() as pool:
        one = pool.submit(first)
        begun.wait()
        for future in (pool.submit(second), one):
            future.result()
    assert PreTrainedModel._finalize_model_loading is own


def header(directory: Path) -> dict[str, Any]:
    content = (directory / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    found: dict[str, Any] = json.loads(content[8 : 8 + length])
    return found


def write_header(directory: Path, text: bytes, length: int | None = None) -> None:
    content = (directory / WEIGHTS).read_bytes()
    old = int.from_bytes(content[:8], "little")
    size = len(text) if length is None else length
    (directory / WEIGHTS).write_bytes(size.to_bytes(8, "little") + text + content[8 + old :])


def overlapping(directory: Path) -> None:
    entries = header(directory)
    entries[Q]["data_offsets"] = entries["model.norm.weight"]["data_offsets"]
    write_header(directory, json.dumps(entries).encode())


def twice(directory: Path) -> None:
    text = json.dumps(header(directory))
    again = json.dumps({Q: header(directory)[Q]})
    write_header(directory, f"{text[:-1]}, {again[1:]}".encode())


@pytest.mark.parametrize(
    "damage",
    [
        overlapping,
        twice,
        lambda directory: write_header(directory, b"{}", 1 << 62),
        lambda directory: write_header(directory, b"[" * 10**5),
        lambda directory: write_header(directory, b"\xff" * 50),
        lambda directory: (directory / WEIGHTS).write_bytes(b""),
        lambda directory: (directory / WEIGHTS).write_bytes(b"\x01"),
    ],
)
def test_a_damaged_safetensors_file_is_refused(saved: Path, damage: Callable[[Path], None]) -> None:
    damage(saved)
    with pytest.raises(ModelLoadError, match=r"weights cannot be loaded|has '.*q_proj.*' twice"):
        load(saved)


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("file", ["config.json", WEIGHTS, "generation_config.json"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    saved: Path, file: str, kind: str
) -> None:
    make_irregular(saved / file, kind)
    with pytest.raises(ModelLoadError, match=f"{file}|no weights"):
        load(saved)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "../../x.safetensors"}, "'../../x.safetensors' in weight_map; it must give each"),
        ({"a": "/x.safetensors"}, "'/x.safetensors' in weight_map"),
        ({"a": "x.safetensors"}, "1 of the 1 files with its weights are missing"),
        ({"a": ["x"]}, "in weight_map; it must give each weight the name of a file"),
        ({"a": "x\0"}, "1 of the 1 files"),
        (5, "'5' in weight_map"),
    ],
)
def test_an_index_names_files_beside_it(saved: Path, weight_map: Any, said: str) -> None:
    (saved / WEIGHTS).rename(saved / "model-1.safetensors")
    change_json(saved / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelLoadError, match=said):
        load(saved)


def test_a_path_that_none_can_be_is_refused() -> None:
    for path, said in (
        ("/a\0b", "the path has a NUL character"),
        ("/" + "a" * 5000, "the path has 5001 characters"),
        ("/" + "a" * 4000, "no such file or directory"),
        ("~no-such-user/a", "begins with the home directory of a user that is unknown"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            load(path)
