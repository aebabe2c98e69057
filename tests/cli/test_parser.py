import pytest

from pagedserve.cli.main import make_parser
from pagedserve.cli.serve import read_args
from pagedserve.config.argument_parser import FlexibleArgumentParser
from pagedserve.config.reasoning import REASONING_FORMATS, ReasoningFormat
from pagedserve.errors import ConfigError


@pytest.mark.parametrize(
    "argv",
    [
        "serve a --max-model-len 50 --no-enable-chunked-prefill",
        "serve a --max_model_len 50 --no_enable_chunked_prefill",
        "serve a --max_model_len=50 --no-enable_chunked-prefill",
    ],
)
def test_options_may_have_underscores(argv: str) -> None:
    options = make_parser().parse_args(argv.split())
    assert (options.max_model_len, options.enable_chunked_prefill) == (50, False)


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "--max_tokens", "5", "--prompt", "a_b"],
        ["chat", "--max_tokens=5", "--system_prompt=a_b"],
        ["complete", "--max_tokens=5", "--model_name=a_b"],
        ["bench", "serve", "--num_prompts=5", "--model=a_b"],
        ["deploy", "a_b", "--min_replicas", "5"],
        ["quantize", "a_b", "--to", "int4", "-o", "x.gguf", "--num_tokens", "5"],
        ["run-batch", "-i", "a_b", "--output_file", "x", "--max_num_seqs", "5"],
    ],
)
def test_every_command_accepts_them_and_leaves_values_alone(argv: list[str]) -> None:
    given = vars(make_parser().parse_args(argv))
    assert 5 in given.values()
    assert "a_b" in given.values() or ["a_b"] in given.values()


def test_a_value_that_begins_with_dashes_is_left_alone() -> None:
    value = "--max_tokens sets the limit"
    options = make_parser().parse_args(["generate", "--prompt", value, f"--stop={value}"])
    assert (options.prompt, options.stop) == ([value], [value])


def test_an_option_that_has_underscores_keeps_them() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--my_option")
    parser.add_argument("--other-option")
    found = parser.parse_args(["--my_option", "1", "--other_option", "2"])
    assert (found.my_option, found.other_option) == ("1", "2")


@pytest.mark.parametrize(
    "argv",
    [
        ["generate"],
        ["bench", "latency"],
        ["bench", "throughput"],
        ["bench", "startup"],
        ["decide", "calibrate", "--examples", "a", "--output", "b"],
    ],
)
@pytest.mark.parametrize("option", ["--generation-config", "--override-generation-config"])
def test_a_command_that_sets_all_sampling_parameters_refuses_other_defaults(
    argv: list[str], option: str
) -> None:
    with pytest.raises(ConfigError, match=f"{option}: '{{}}' has no effect in this command"):
        make_parser().parse_args([*argv, option, "{}"])


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        ("serve a --gpu-memory-utilisation 0.5", "; did you mean --gpu-memory-utilization?"),
        ("serve a --prot=5", "; did you mean --port?"),
        ("generate --promt a", "; did you mean --prompt?"),
        ("bench serve --request-rates 5", "; did you mean --request-rate?"),
        ("serve a --zzz", r"unrecognized arguments: --zzz \(see pagedserve serve --help\)"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest(argv: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest.replace("?", r"\?")):
        make_parser().parse_args(argv.split())


def test_batches_have_the_options_of_tool_calls() -> None:
    argv = "run-batch -i a -o b smollm2 --no-generic-tool-calls --no-close-schemas"
    _, server_args = read_args(make_parser().parse_args(argv.split()))
    assert (server_args.generic_tool_calls, server_args.close_schemas) == (False, False)


def test_the_engine_has_the_tags_of_the_reasoning_parser() -> None:
    own = '{"reasoning_start_str": "a", "reasoning_end_str": "b"}'
    expected = {
        (): None,
        ("--reasoning-parser", "mistral"): REASONING_FORMATS["mistral"],
        ("--reasoning-config", own): ReasoningFormat(start="a", end="b"),
        ("--reasoning-config", own, "--reasoning-parser", "qwen3"): (
            ReasoningFormat(start="a", end="b")
        ),
    }
    for argv, known in expected.items():
        engine_args, _ = read_args(make_parser().parse_args(["serve", "smollm2", *argv]))
        assert engine_args.reasoning_config == known
