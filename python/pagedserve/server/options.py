"""``ServerArgs``: every option of the server, each defined once."""

import argparse
import inspect
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, Self

import pagedserve.checks as checks
from pagedserve.config.options import (
    add_arguments,
    check_options,
    describe,
    option,
    parse_bytes,
    parse_mapping,
)
from pagedserve.config.reasoning import REASONING_FORMATS
from pagedserve.server.http.bounds import MAX_ID_CHARS
from pagedserve.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from pagedserve.server.tools.formats import TOOL_FORMATS

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_MAX_PORT: Final = 65535


def _up_to(most: int) -> checks.Check[int]:
    accepted = f"from 0 to {most}"

    def check(name: str, value: object) -> int:
        number = checks.integer(accepted, low=0)(name, value)
        if number > most:
            checks.refuse(name, value, f"an integer, {accepted}")
        return number

    return check


# Names of adapters: words and punctuation, in parts that cannot be a path to a parent directory.
ADAPTER_NAME: Final = (
    "letters, digits and ._:@+=- in parts between slashes, each of which begins with a letter or "
    "a digit"
)
_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._:@+=-]*"
_ADAPTER_NAME: Final = re.compile(rf"{_PART}(/{_PART})*")


def is_adapter_name(name: str) -> bool:
    """Whether a name is valid for an adapter: at most 256 characters, see ``ADAPTER_NAME``."""
    return len(name) <= MAX_ID_CHARS and _ADAPTER_NAME.fullmatch(name) is not None


class LoraModule(NamedTuple):
    """An adapter that is served under a name.

    Attributes:
        name: Model name of requests for it.
        path: Directory of its files, or a hub id.
        base_model_name: Name of the model that it was trained on, for information.
    """

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``NAME=PATH``, or a JSON object with these fields.

        Raises:
            ValueError: Another form.
        """
        if text.startswith("{"):
            try:
                module = cls(**json.loads(text))
            except TypeError as error:  # fields that are missing or unknown
                raise ValueError(str(error)) from error
        else:
            name, _, path = text.partition("=")
            module = cls(name, path)
        if not (is_adapter_name(module.name) and module.path):
            raise ValueError("the name is none, or the path is empty")
        return module


def _lora_module(name: str, value: object) -> str:
    text = checks.text(name, value)
    try:
        LoraModule.parse(text)
    except ValueError:
        accepted = f'NAME=PATH or {{"name": "NAME", "path": "PATH"}}, where NAME has {ADAPTER_NAME}'
        checks.refuse(name, value, accepted)
    return text


# Options that change what a response has.
_OF_ANSWERS: Final = frozenset(
    {
        *("served_model_name", "enable_prompt_tokens_details", "allow_unknown_fields"),
        *("lora_modules", "chat_template", "default_chat_template_kwargs"),
        *("response_role", "tool_call_parser"),
        *("reasoning_parser", "reasoning_field", "trust_request_chat_template"),
        *("tool_parser_plugin", "reasoning_parser_plugin", "generic_tool_calls", "close_schemas"),
    }
)

_PATH: Final = checks.optional(checks.text)
_PLUGIN: Final = checks.optional(lambda name, value: checks.text(name, value) if value else None)
_TEXTS: Final = checks.each(checks.text, "a list of strings")
_SECONDS: Final = checks.real("a number of seconds, at least 0", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Every option of the server, checked on construction.

    Raises:
        ConfigError: An invalid value; the message says what is accepted.
    """

    host: str = option("127.0.0.1", checks.text, "Address to listen on.", concern="server")
    port: int = option(8000, _up_to(_MAX_PORT), "Port; 0 is any free one.", concern="server")
    uds: str | None = option(
        None,
        _PATH,
        "Unix domain socket to listen on, instead of host and port.",
        concern="server",
        unset="none",
    )
    root_path: str = option(
        "",
        lambda name, value: value if value == "" else checks.text(name, value),
        "Path under which a proxy serves this server.",
        concern="server",
        unset="none",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        _TEXTS,
        "Names of the model in requests; responses have the first.",
        concern="server",
        unset="model",
    )
    api_key: tuple[str, ...] = option(
        (),
        _TEXTS,
        "API keys, one of which each request must have; also PAGEDSERVE_API_KEY.",
        concern="server",
        unset="none",
    )
    batch_directory: str | None = option(
        None,
        _PATH,
        "Directory for the files and batches of /v1/files and /v1/batches, which it turns on; for "
        "one server at a time.",
        concern="server",
        unset="no such routes",
    )
    enable_admin_routes: bool = option(
        False,
        checks.flag,
        "Serve POST /reset_prefix_cache, /abort_requests, /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter.",
        concern="server",
    )
    shutdown_timeout: float = option(
        30.0,
        _SECONDS,
        "Seconds that running requests have to finish after SIGTERM.",
        concern="server",
    )
    stall_timeout: float = option(
        60.0,
        checks.real("a number of seconds, above 0", low=0, open_low=True),
        "Seconds without a completed step after which /health responds with 503, and without a "
        "read after which a client is disconnected.",
        concern="server",
    )
    sse_keep_alive_interval: float = option(
        15.0,
        _SECONDS,
        "Seconds of silence after which a stream sends an empty event, in the form of its API, "
        "about a second late; 0 for never.",
        concern="server",
    )
    enable_prompt_tokens_details: bool = option(
        False,
        checks.flag,
        "Report in usage how many prompt tokens came from the prefix cache.",
        concern="server",
    )
    enable_force_include_usage: bool = option(
        False,
        checks.flag,
        "Report usage in every chunk of a stream, as with include_usage and continuous_usage_stats "
        "in stream_options.",
        concern="server",
    )
    allow_unknown_fields: bool = option(
        False,
        checks.flag,
        "Ignore unknown fields of requests instead of refusing them.",
        concern="server",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        checks.each(_lora_module, "a list of adapters"),
        "Adapters to serve, each with the model name of its requests and a directory or hub id: "
        'NAME=PATH or a JSON object with "name", "path" and "base_model_name". Needs enable_lora.',
        concern="LoRA",
        unset="none",
    )
    chat_template: str | None = option(
        None,
        _PATH,
        "File of a chat template, or its text.",
        concern="chat and tool calls",
        unset="the model's own",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        checks.optional(checks.mapping),
        'Variables of the chat template for requests that do not set them, as {"enable_thinking": '
        "false}; JSON on the command line.",
        concern="chat and tool calls",
        unset="none",
        parse=parse_mapping,
    )
    response_role: str = option(
        "assistant",
        checks.text,
        "Role of chat responses.",
        concern="chat and tool calls",
    )
    tool_call_parser: str | None = option(
        None,
        _PATH,
        f"Format of the model's tool calls: {', '.join(TOOL_FORMATS)}, or one of a plug-in.",
        concern="chat and tool calls",
        unset="found from the chat template",
    )
    tool_parser_plugin: str | None = option(
        None,
        _PLUGIN,
        "Python file with further formats of tool calls, as TOOL_PARSERS.",
        concern="chat and tool calls",
        unset="none",
    )
    generic_tool_calls: bool = option(
        True,
        checks.flag,
        "Describe tools in the system message, and hold calls to their schemas by a grammar, if "
        "the chat template shows no tools; such requests are refused otherwise.",
        concern="chat and tool calls",
    )
    close_schemas: bool = option(
        True,
        checks.flag,
        "Treat additionalProperties as false in schemas of tools, and of response_format with "
        "strict, where these do not set it.",
        concern="chat and tool calls",
    )
    decision_calibration: str | None = option(
        None,
        _PATH,
        "File of temperatures for typed decisions, from pagedserve decide calibrate.",
        concern="chat and tool calls",
        unset="a temperature of 1",
    )
    reasoning_parser: str | None = option(
        None,
        _PATH,
        "Format of the model's reasoning, which is then separated from the content: "
        f"{', '.join(REASONING_FORMATS)}, or one of a plug-in.",
        concern="chat and tool calls",
        unset="reasoning is part of the content",
    )
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = option(
        "both",
        checks.choice(("both", "reasoning", "reasoning_content")),
        "Name of the reasoning in messages and deltas of chats: vLLM's (reasoning), DeepSeek's "
        "(reasoning_content), or both, which some clients cannot read.",
        concern="chat and tool calls",
    )
    reasoning_parser_plugin: str | None = option(
        None,
        _PLUGIN,
        "Python file with further formats of reasoning, as REASONING_PARSERS.",
        concern="chat and tool calls",
        unset="none",
    )
    trust_request_chat_template: bool = option(
        False,
        checks.flag,
        "Accept chat templates in requests, which are code that runs in the server.",
        concern="chat and tool calls",
    )
    max_num_queued_reqs: int | None = option(
        None,
        checks.optional(checks.integer("at least 0, or None", low=0)),
        "Maximum number of waiting sequences, beside the running ones; more are refused with 503.",
        concern="limits",
        unset="4 times max_num_seqs, at least 2048",
    )
    max_num_queued_tokens: int | None = option(
        None,
        checks.optional_count(),
        "Approximate maximum number of waiting prompt tokens; more are refused with 503.",
        concern="limits",
        unset="limited by max_num_queued_reqs alone",
    )
    max_body_bytes: int = option(
        32 * _MIB,
        checks.count(),
        "Maximum size of a request's body, in bytes or as in 512KiB.",
        concern="limits",
        parse=parse_bytes,
    )
    max_open_body_bytes: int | None = option(
        None,
        checks.optional_count(),
        "Maximum total size of request bodies that are incomplete or not parsed yet, without the "
        "first 64 KiB of each; more are refused with 503.",
        concern="limits",
        parse=parse_bytes,
        unset="8 times max_body_bytes",
    )
    max_stored_response_bytes: int = option(
        256 * _MIB,
        checks.integer("at least 0", low=0),
        "Maximum total size of stored responses and their inputs (/v1/responses); the least "
        "recently used are dropped. 0 stores none.",
        concern="limits",
        parse=parse_bytes,
    )
    max_batch_directory_bytes: int = option(
        10 * _GIB,
        checks.count(),
        "Maximum total size of the files in batch_directory; uploads beyond it are refused, and a "
        "batch whose responses exceed it fails.",
        concern="limits",
        parse=parse_bytes,
    )
    max_connections: int | None = option(
        None,
        checks.optional_count(),
        "Maximum number of open connections; more are refused with 503.",
        concern="limits",
        unset="three quarters of the process's file descriptors, at most 10000",
    )
    receive_timeout: float = option(
        60.0,
        checks.real("a number of seconds, above 0", low=0, open_low=True),
        "Seconds that a request's header may take to arrive, and then each MiB of its body; slower "
        "ones are refused with 408.",
        concern="limits",
    )
    ssl_keyfile: str | None = option(
        None, _PATH, "File of the TLS key.", concern="TLS and CORS", unset="no TLS"
    )
    ssl_certfile: str | None = option(
        None, _PATH, "File of the TLS certificate.", concern="TLS and CORS", unset="no TLS"
    )
    ssl_ca_certs: str | None = option(
        None,
        _PATH,
        "File of the certificates that client certificates are verified by.",
        concern="TLS and CORS",
        unset="none",
    )
    ssl_cert_reqs: int = option(
        0,
        _up_to(ssl.CERT_REQUIRED),
        "Client certificates: 0 is none, 1 optional, 2 required.",
        concern="TLS and CORS",
    )
    ssl_ciphers: str | None = option(
        None,
        _PATH,
        "Ciphers of TLS up to 1.2, in OpenSSL's format.",
        concern="TLS and CORS",
        unset="those of Python",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        _TEXTS,
        "Origins whose web pages may use the server from a browser; * is any.",
        concern="TLS and CORS",
        unset="none",
    )
    allow_credentials: bool = option(
        False,
        checks.flag,
        "Allow web pages of these origins to send cookies and other credentials.",
        concern="TLS and CORS",
    )
    allowed_methods: tuple[str, ...] = option(
        (), _TEXTS, "HTTP methods of such web pages.", concern="TLS and CORS", unset="*"
    )
    allowed_headers: tuple[str, ...] = option(
        (), _TEXTS, "HTTP headers of such web pages.", concern="TLS and CORS", unset="*"
    )
    enable_log_requests: bool = option(
        True, checks.flag, "Log one line per finished request.", concern="logging and tracing"
    )
    log_prompts: bool = option(
        False,
        checks.flag,
        "Include prompts and outputs in the log lines of requests.",
        concern="logging and tracing",
    )
    max_log_len: int | None = option(
        None,
        checks.optional(checks.integer("at least 0, or None", low=0)),
        "Maximum number of characters of each logged prompt or output.",
        concern="logging and tracing",
        unset="no limit",
    )
    log_format: Literal["text", "json"] = option(
        "text",
        checks.choice(("text", "json")),
        "Format of the log: readable lines, or one JSON object per line.",
        concern="logging and tracing",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        checks.optional(checks.url),
        "URL that request spans are sent to by OTLP over HTTP, as http://127.0.0.1:4318/v1/traces.",
        concern="logging and tracing",
        unset="none",
    )
    uvicorn_log_level: str = option(
        "warning",
        checks.choice(("critical", "error", "warning", "info", "debug")),
        "Lowest level of uvicorn's log lines: critical, error, warning, info or debug.",
        concern="logging and tracing",
    )

    def __post_init__(self) -> None:
        """Check every option, and add the parsers of plug-ins."""
        check_options(self)
        if self.tool_parser_plugin:
            TOOL_PARSERS.add_file("tool_parser_plugin", self.tool_parser_plugin)
        if self.reasoning_parser_plugin:
            REASONING_PARSERS.add_file("reasoning_parser_plugin", self.reasoning_parser_plugin)
        TOOL_PARSERS.check("tool_call_parser", self.tool_call_parser)
        REASONING_PARSERS.check("reasoning_parser", self.reasoning_parser)

    def model_names(self, model: str) -> tuple[str, ...]:
        """Names of a model in requests; responses have the first."""
        return self.served_model_name or (model,)

    @classmethod
    def add_answer_args(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser the options that change a response, and no others."""
        add_arguments(parser, cls, names=_OF_ANSWERS)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser one option for each field, and a hidden one for vLLM's former name."""
        add_arguments(parser, cls)
        parser.add_argument(
            "--disable-log-requests",
            dest="enable_log_requests",
            action="store_const",
            const=False,
            help=argparse.SUPPRESS,
        )

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` or ``add_answer_args`` found.

        Options that the parser lacks have their defaults.

        Raises:
            ConfigError: An invalid value.
        """
        names = [argument.name for argument in fields(cls) if hasattr(namespace, argument.name)]
        return cls(**{name: getattr(namespace, name) for name in names})


ServerArgs.__doc__ = f"{inspect.getdoc(ServerArgs)}\n\n{describe(ServerArgs)}"
