"""``ServerArgs``: everything that decides how the server serves, each option written once."""

import argparse
import inspect
import json
import ssl
from dataclasses import dataclass, fields
from typing import Final, Literal, NamedTuple, Self

import pagedserve.checks as checks
from pagedserve.options import add_arguments, check_options, describe, option, parse_bytes
from pagedserve.server.tool_formats import REASONING_FORMATS, TOOL_FORMATS

_MIB: Final = 1 << 20
_MAX_PORT: Final = 65535


def _up_to(most: int) -> checks.Check[int]:
    accepted = f"from 0 to {most}"

    def check(name: str, value: object) -> int:
        number = checks.integer(accepted, low=0)(name, value)
        if number > most:
            checks.refuse(name, value, f"an integer, {accepted}")
        return number

    return check


class LoraModule(NamedTuple):
    """An adapter that is served under a name.

    Attributes:
        name: As of a model.
        path: The directory of its files.
        base_model_name: What it was trained on, for people.
    """

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """What ``NAME=PATH``, or a JSON object with these fields, says.

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
        if not (module.name and module.path):
            raise ValueError("name or path is empty")
        return module


def _lora_module(name: str, value: object) -> str:
    text = checks.text(name, value)
    try:
        LoraModule.parse(text)
    except ValueError:
        checks.refuse(name, value, 'NAME=PATH or {"name": "NAME", "path": "PATH"}')
    return text


_PATH: Final = checks.optional(checks.text)
_TEXTS: Final = checks.each(checks.text, "a list of strings")
_SECONDS: Final = checks.real("a number of seconds, at least 0", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Everything that decides how the server serves; checked when made.

    Raises:
        ConfigError: A value that cannot be; the message says what is accepted.
    """

    host: str = option("127.0.0.1", checks.text, "Address to listen at.")
    port: int = option(8000, _up_to(_MAX_PORT), "Port; 0 takes any free one.")
    uds: str | None = option(
        None, _PATH, "Unix domain socket to listen at, instead of host and port.", unset="none"
    )
    served_model_name: tuple[str, ...] = option(
        (), _TEXTS, "Names of the model; the first is shown.", unset="model"
    )
    api_key: tuple[str, ...] = option(
        (), _TEXTS, "Keys one of which a client must show; also PAGEDSERVE_API_KEY.", unset="none"
    )
    chat_template: str | None = option(
        None, _PATH, "File with a chat template, or its text.", unset="the model's own"
    )
    response_role: str = option("assistant", checks.text, "Role of the answers in a chat.")
    tool_call_parser: str | None = option(
        None,
        checks.choice((*TOOL_FORMATS, None)),
        f"How the model writes tool calls: {', '.join(TOOL_FORMATS)}.",
        unset="as its chat template does",
    )
    reasoning_parser: str | None = option(
        None,
        checks.choice((*REASONING_FORMATS, None)),
        "Tell thoughts from the answer, as they are written by the family: "
        f"{', '.join(REASONING_FORMATS)}.",
        unset="thoughts are content",
    )
    root_path: str = option(
        "",
        lambda name, value: value if value == "" else checks.text(name, value),
        "Path under which a proxy serves this server.",
        unset="none",
    )
    max_num_queued_reqs: int | None = option(
        None,
        checks.optional(checks.integer("at least 0, or None", low=0)),
        "Sequences that may wait beside those that run; more are refused with 503.",
        unset="4 times max_num_seqs",
    )
    max_num_queued_tokens: int | None = option(
        None,
        checks.optional_count(),
        "Prompt tokens that may wait, of texts about as many; more are refused with 503.",
        unset="what max_num_queued_reqs allows",
    )
    max_body_bytes: int = option(
        32 * _MIB,
        checks.count(),
        "Bytes of a request's body; also as in 512KiB.",
        parse=parse_bytes,
    )
    shutdown_timeout: float = option(
        30.0, _SECONDS, "Seconds that running requests have to end after SIGTERM."
    )
    stall_timeout: float = option(
        60.0,
        checks.real("a number of seconds, above 0", low=0, open_low=True),
        "Seconds without the end of a step after which /health says 503, and for which a client "
        "may read nothing.",
    )
    enable_prompt_tokens_details: bool = option(
        False, checks.flag, "Say in usage how many prompt tokens the prefix cache had."
    )
    trust_request_chat_template: bool = option(
        False, checks.flag, "Take chat templates from requests: code that runs here."
    )
    allow_unknown_fields: bool = option(
        False, checks.flag, "Pass over unknown fields of requests instead of refusing them."
    )
    enable_admin_routes: bool = option(
        False,
        checks.flag,
        "Offer POST /reset_prefix_cache, /abort_requests, /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter.",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        checks.each(_lora_module, "a list of adapters"),
        "Adapters to serve, each a directory or a hub id, and the name of a model: NAME=PATH or a "
        'JSON object with "name", "path" and "base_model_name"; with enable_lora.',
        unset="none",
    )
    enable_log_requests: bool = option(
        True, checks.flag, "Write a line a finished request to the log."
    )
    log_prompts: bool = option(
        False, checks.flag, "Let that line say what users asked and what the model answered."
    )
    max_log_len: int | None = option(
        None,
        checks.optional(checks.integer("at least 0, or None", low=0)),
        "Characters of each such text, at most.",
        unset="all",
    )
    log_format: Literal["text", "json"] = option(
        "text",
        checks.choice(("text", "json")),
        "A readable line a record of the log, or an object.",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        checks.optional(checks.url),
        "URL that takes spans of requests by OTLP over HTTP, as http://127.0.0.1:4318/v1/traces.",
        unset="none",
    )
    allowed_origins: tuple[str, ...] = option(
        (), _TEXTS, "Origins whose pages may use the server from a browser; * is any.", unset="none"
    )
    allow_credentials: bool = option(
        False, checks.flag, "Let such pages send cookies and the like."
    )
    allowed_methods: tuple[str, ...] = option((), _TEXTS, "Methods of such pages.", unset="*")
    allowed_headers: tuple[str, ...] = option((), _TEXTS, "Headers of such pages.", unset="*")
    uvicorn_log_level: str = option(
        "info",
        checks.choice(("critical", "error", "warning", "info", "debug")),
        "Of what uvicorn writes to the log: critical, error, warning, info or debug.",
    )
    ssl_keyfile: str | None = option(None, _PATH, "Key for TLS.", unset="no TLS")
    ssl_certfile: str | None = option(None, _PATH, "Certificate for TLS.", unset="no TLS")
    ssl_ca_certs: str | None = option(
        None, _PATH, "Certificates that clients are checked by.", unset="none"
    )
    ssl_cert_reqs: int = option(
        0,
        _up_to(ssl.CERT_REQUIRED),
        "Whether clients need a certificate: 0 no, 1 checked if there is one, 2 yes.",
    )

    def __post_init__(self) -> None:
        """Check every option."""
        check_options(self)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser one option for each field, and unseen the name that vLLM's one has had."""
        group = add_arguments(parser, cls, "server")
        group.add_argument(
            "--disable-log-requests",
            dest="enable_log_requests",
            action="store_const",
            const=False,
            help=argparse.SUPPRESS,
        )

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` found.

        Raises:
            ConfigError: A value that cannot be.
        """
        return cls(**{argument.name: getattr(namespace, argument.name) for argument in fields(cls)})


ServerArgs.__doc__ = f"{inspect.getdoc(ServerArgs)}\n\n{describe(ServerArgs)}"
