"""The Serve application: deployment, update and shutdown of replicas."""

import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedserve.config import EngineArgs
from pagedserve.deploy.options import DeployArgs
from pagedserve.errors import ConfigError, ModelLoadError, extra_needed
from pagedserve.models.tokenizer.loader import load_tokenizer

with extra_needed("pagedserve.deploy", "ray-serve"):
    # Otherwise Ray logs a stack trace at every SIGTERM.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from pagedserve.deploy.client import Deployed, ReplicatedEngine
from pagedserve.deploy.replica import Replica
from pagedserve.deploy.router import PrefixRouter

if TYPE_CHECKING:
    from ray.serve.deployment import Application
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

# Seconds between two health checks of a replica.
_HEALTH_PERIOD = 2.0
# Default cores of a replica.
_MAX_NUM_SEQS = 256


def replicas(
    engine_args: EngineArgs, deploy_args: DeployArgs, *, stall_timeout: float = 60.0
) -> "Application":
    """Build an application with replicas of an engine, for ``serve.run``.

    Args:
        engine_args: Options of each engine, which are copied.
        deploy_args: Options of the deployment.
        stall_timeout: Seconds without a completed step after which a replica is replaced.

    Raises:
        ConfigError: Ranks are to be started by Ray without reserving resources, or options
            contradict each other.
    """
    engine_args = replace(engine_args)
    router: Any = f"{PrefixRouter.__module__}.{PrefixRouter.__qualname__}"
    cpus, gpus = deploy_args.replica_num_cpus, deploy_args.replica_num_gpus
    placed: dict[str, Any] = {}
    if engine_args.distributed_executor_backend == "ray":
        # Each rank has a bundle; the first is for the replica's process.
        bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        if not bundle:
            raise ConfigError(
                "replica_num_cpus and replica_num_gpus are 0; one must be above 0 where "
                "distributed_executor_backend is 'ray', which reserves them for each rank"
            )
        placed["placement_group_bundles"] = [bundle] * engine_args.tensor_parallel_size
    deployment: Any = serve.deployment(
        # Requests queue in the router, from where they can be sent to new replicas.
        max_ongoing_requests=2 * (engine_args.max_num_seqs or _MAX_NUM_SEQS),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        **placed,
        request_router_config=RequestRouterConfig(request_router_class=router),
        autoscaling_config=AutoscalingConfig(
            min_replicas=deploy_args.min_replicas,
            initial_replicas=deploy_args.min_replicas,
            max_replicas=deploy_args.most,
            target_ongoing_requests=deploy_args.target_ongoing_requests,
            upscale_delay_s=deploy_args.upscale_delay_s,
            downscale_delay_s=deploy_args.downscale_delay_s,
        ),
        health_check_period_s=_HEALTH_PERIOD,
    )
    application: Application = deployment(Replica).bind(engine_args, stall_timeout)
    return application


def deploy(
    engine_args: EngineArgs, deploy_args: DeployArgs, *, stall_timeout: float = 60.0
) -> ReplicatedEngine:
    """Start replicas on a Ray cluster, by default a new one on this machine.

    Returns:
        The engine of the replicas; it is still loading.
    """
    return ReplicatedEngine(
        partial(_start, replace(engine_args), deploy_args, stall_timeout),
        partial(_end, deploy_args.app_name, owns_cluster=deploy_args.ray_address is None),
    )


def update(
    engine_args: EngineArgs, deploy_args: DeployArgs, *, stall_timeout: float = 60.0
) -> None:
    """Replace the replicas of a running application one by one.

    Streams of a stopped replica resume after their tokens on another.

    Raises:
        ConfigError: The application does not run.
        ModelLoadError: The new replicas do not start; old ones are kept.
    """
    load_tokenizer(engine_args)
    application = replicas(engine_args, deploy_args, stall_timeout=stall_timeout)
    _connect(deploy_args.ray_address or "auto")
    running = list(serve.status().applications)
    if deploy_args.app_name not in running:
        raise ConfigError(f"app_name is {deploy_args.app_name!r}; what runs there is {running}")
    _run(application, deploy_args.app_name)
    ray.shutdown()


def _start(engine_args: EngineArgs, deploy_args: DeployArgs, stall_timeout: float) -> Deployed:
    tokenizer = load_tokenizer(engine_args)  # refuses a missing model at once
    application = replicas(engine_args, deploy_args, stall_timeout=stall_timeout)
    _connect(deploy_args.ray_address)
    logger.info("Ray cluster: %s", _resources())
    if deploy_args.ray_address is None:
        _check_resources(engine_args, deploy_args)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    handle = _run(application, deploy_args.app_name)
    facts = handle.facts.remote().result()
    return Deployed(handle, tokenizer, facts, deploy_args.most)


def _connect(address: str | None) -> None:
    """Connect to a cluster; without an address start one on this machine, whatever runs there.

    Raises:
        ConfigError: There is no cluster at the address.
    """
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        raise ConfigError(f"ray_address is {address!r}, where no cluster answers") from error


def _check_resources(engine_args: EngineArgs, deploy_args: DeployArgs) -> None:
    """Check that a cluster that gets no other machines has the resources of the replicas.

    Raises:
        ConfigError: It has not, and Ray Serve would wait for them indefinitely.
    """
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    is_placed = engine_args.distributed_executor_backend == "ray"
    num_ranks = engine_args.tensor_parallel_size if is_placed else 1
    for name in ("CPU", "GPU"):
        option = f"replica_num_{name.lower()}s"
        # Ray counts ten-thousandths.
        needed = round(deploy_args.min_replicas * num_ranks * getattr(deploy_args, option), 4)
        if needed > found.get(name, 0):
            raise ConfigError(
                f"min_replicas is {deploy_args.min_replicas}, which need {needed:g} {name}s by "
                f"{option}; this machine has {found.get(name, 0):g}"
            )


def _run(application: "Application", name: str) -> "DeploymentHandle[Replica]":
    """Run the replicas; returns when they are ready."""
    try:
        return serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        why = _reason(name) or str(error)
        raise ModelLoadError(f"the replicas could not be deployed: {why}") from error


def _reason(app_name: str) -> str:
    """Error of the last replica that failed to start; "" if unknown."""
    found = serve.status().applications.get(app_name)
    messages = [status.message for status in found.deployments.values()] if found else []
    lines = [line for message in messages for line in message.splitlines() if "Error: " in line]
    return lines[-1].strip() if lines else ""


def _resources() -> str:
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return f"{found.get('CPU', 0):.0f} CPUs, {found.get('GPU', 0):.0f} GPUs"


def _end(app_name: str, waits: bool, *, owns_cluster: bool) -> None:
    """Delete the application.

    Args:
        app_name: Name of the application.
        waits: Whether to wait until it is deleted; without, the process is about to exit.
        owns_cluster: Whether the cluster was started for it, and ends with the process.
    """
    if not ray.is_initialized() or (owns_cluster and not waits):
        return
    if owns_cluster:
        serve.shutdown()  # type: ignore[no-untyped-call]
    else:
        serve.delete(app_name, _blocking=waits)
        serve.status()  # answered once the controller has the request
    ray.shutdown()
