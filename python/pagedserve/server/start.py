"""The start of ``pagedserve serve``: the engine loads while the server is imported."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pagedserve.collector import collector_paused
from pagedserve.config import EngineArgs
from pagedserve.engine.async_engine import AsyncLLMEngine
from pagedserve.engine.client import ServedEngine
from pagedserve.engine.defaults import default_sampling_params, public_name, server_defaults
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.errors import extra_needed
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.options import ServerArgs
from pagedserve.server.prepare import Prepared

if TYPE_CHECKING:
    from pagedserve.server.http.tracing import Tracer


def serve(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    prepared: Prepared,
    start: Callable[[], ServedEngine] | None = None,
) -> int:
    """Serve until a signal, or until the engine dies.

    Args:
        engine_args: Options of the engine.
        server_args: Options of the server.
        prepared: The socket, and files read for the server.
        start: Starts to load the engine outside this process; None loads it in this process.

    Returns:
        The exit status: 0 after a signal, 1 if the engine has died.

    Raises:
        ConfigError: Arguments that contradict the model or the memory.
        ModelLoadError: The model cannot be found, read or run.
        ImportError: An option needs packages that are not installed.
    """
    tracer = make_tracer(server_args.otlp_traces_endpoint)
    client: ServedEngine
    default_params: Future[SamplingParams] = Future()
    if start is None:
        client = start_engine(engine_args, server_args, default_params)
    else:
        client = start()
        default_params.set_result(default_sampling_params(engine_args))
    with extra_needed("pagedserve serve", "serve"), collector_paused():
        from pagedserve.server.run import run
    return run(
        client,
        server_args.model_names(engine_args.model),
        server_args,
        prepared,
        root=public_name(engine_args),
        default_params=default_params,
        tracer=tracer,
    )


def start_engine(
    engine_args: EngineArgs, server_args: ServerArgs, default_params: Future[SamplingParams]
) -> AsyncLLMEngine:
    """Start to load an engine with a server's defaults in this process.

    Args:
        engine_args: Options of the engine.
        server_args: Options of the server.
        default_params: Receives the model's default sampling parameters.
    """

    def make_engine() -> LLMEngine:
        default_params.set_result(default_sampling_params(engine_args))
        return LLMEngine(engine_args, choose=server_defaults)

    return AsyncLLMEngine(make_engine, stall_timeout=server_args.stall_timeout)


def make_tracer(endpoint: str | None) -> "Tracer | None":
    """Create the tracer of requests; None without an endpoint.

    Raises:
        ImportError: The packages are not installed.
    """
    if endpoint is None:
        return None
    with extra_needed("--otlp-traces-endpoint", "otel"):
        from pagedserve.server.http.tracing import Tracer
    return Tracer(endpoint)
