"""Ranks as Ray actors, on the machines of a Ray cluster.

Ray places and starts them, and detects lost machines; it is not involved in steps.  Each actor
listens on a separate port, protected by a key that Ray delivers, and from then on is a rank like
any other.  Ranks on rank 0's node map the shared memory of steps; others receive the steps as
messages.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from pagedserve.config import EngineArgs
from pagedserve.device import choose_device
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.executor.subprocesses import StopWatch

# Seconds: to wait for Ray's reason why an actor ended; without a response after which an actor
# counts
# as dead, since work that holds the interpreter lock, such as compilation, takes some.
_ENDING: Final = 0.5
_SILENCE: Final = 30.0


class Whereabouts(NamedTuple):
    """Location of an actor.

    Attributes:
        node_id: Ray's node id.
        pid: Process id.
        address: Host and port on which it listens.
    """

    node_id: str
    pid: int
    address: tuple[str, int]


class RankActor:
    """The Ray actor of one rank."""

    def listen(self, key: bytes, directory: str) -> Whereabouts:
        """Listen for a connection, in the directory of the connecting process if on its machine."""
        import ray

        with contextlib.suppress(OSError):
            os.chdir(directory)
        self._listener = Listener((_address(), 0), authkey=key)
        place = ray.get_runtime_context().get_node_id()
        return Whereabouts(place, os.getpid(), cast(tuple[str, int], self._listener.address))

    def serve(self) -> None:
        """Run as a rank of the engine that connects."""
        from pagedserve.executor.rank import serve

        connection = self._listener.accept()
        self._listener.close()
        send_at_once(connection)
        serve(connection)

    def ping(self) -> None:
        """Return, concurrently with ``serve``."""

    def gpu(self) -> int:
        """Index on the machine of the GPU that Ray has assigned."""
        import ray

        return int(ray.get_gpu_ids()[0])


class RayProcess:
    """An actor with its connection: a ``RankProcess``."""

    device_index: int = 0  # Ray makes only its GPU visible

    def __init__(self, actor: Any, where: Whereabouts, key: bytes, memory: str | None) -> None:
        """Connect to a listening actor.

        Args:
            actor: Ray's handle.
            where: Location of the actor.
            key: Key that the actor was given.
            memory: Path under which it maps the shared memory of steps; None if it cannot.
        """
        self.memory = memory
        self.where = where
        self._actor = actor
        self._life = actor.serve.remote()
        self.connection: Connection = Client(where.address, authkey=key)
        send_at_once(self.connection)
        self._stopped = None if memory is None else StopWatch(where.pid)
        self._ping = actor.ping.remote()
        self._asked_at = time.monotonic()

    def stuck(self) -> str | None:
        """Why it hangs, or None; a lost machine does not close its connections."""
        import ray

        if self._stopped is not None and (why := self._stopped.stuck()) is not None:
            return why
        if ray.wait([self._life], timeout=0)[0]:
            return self.ending()
        if ray.wait([self._ping], timeout=0)[0]:
            self._ping, self._asked_at = self._actor.ping.remote(), time.monotonic()
        elif time.monotonic() - self._asked_at > _SILENCE:
            return f"its actor at {self.where.address[0]} has not answered for {_SILENCE:.0f} s"
        return None

    def ending(self) -> str:
        """How the process ended; called when it has ended, or is about to."""
        import ray

        try:
            ray.get(self._life, timeout=_ENDING)
        except ray.exceptions.GetTimeoutError:
            return f"its actor at {self.where.address[0]} left its connection"
        except Exception as error:  # noqa: BLE001  # contains Ray's reason
            words = " ".join(str(error).split())
            why = words.rpartition("The actor is dead because ")[2]
            return f"its actor at {self.where.address[0]} ended: {why}"
        return f"its actor at {self.where.address[0]} ended"

    def kill(self) -> None:
        """Kill it; Ray ends its process soon after this returns."""
        import ray

        with contextlib.suppress(Exception):  # the cluster may be lost too
            ray.kill(self._actor)


class RayBackend:
    """Starts ranks in a Ray placement group: a ``Backend``.

    Uses the placement group of this process, which replicas of Ray Serve have, or else creates one
    with the first bundle on this process's node.
    """

    def __init__(self, args: EngineArgs) -> None:
        """Reserve resources for all ranks, waiting for them.

        Raises:
            ConfigError: The cluster, or the placement group of this process, has too few resources.
            ImportError: Ray is not installed.
        """
        with extra_needed("distributed_executor_backend='ray'", "ray"):
            import ray
        self._size = args.tensor_parallel_size
        self._has_begun = not ray.is_initialized()
        if self._has_begun:
            ray.init(logging_level=logging.WARNING)
        self._node_id = ray.get_runtime_context().get_node_id()
        self.host: str | None = _address()
        self._resource = "GPU" if choose_device(args.device).type == "cuda" else "CPU"
        self._made: Any = None
        self._actors: list[Any] = []
        try:
            self._group = ray.util.get_current_placement_group() or self._make_group(args)
            self._bundles = self._sorted_bundles()
            self.device_index = self._own_gpu()
        except BaseException:
            self.end()
            raise

    def start(self, memory: int) -> Sequence[RayProcess]:
        """Start processes for ranks 1 and up, in their order; see ``Backend``."""
        import ray

        key = secrets.token_bytes(32)
        actors = [self._start_actor(bundle) for bundle in self._bundles[1:]]
        places = ray.get([actor.listen.remote(key, str(Path.cwd())) for actor in actors])
        path = f"/proc/{os.getpid()}/fd/{memory}"
        return [
            RayProcess(actor, place, key, path if place.node_id == self._node_id else None)
            for actor, place in zip(actors, places, strict=True)
        ]

    def end(self) -> None:
        """Release the resources; see ``Backend``."""
        import ray

        with contextlib.suppress(Exception):  # the cluster may be lost too
            for actor in self._actors:
                ray.kill(actor)
            if self._made is not None:
                ray.util.remove_placement_group(self._made)
        if self._has_begun:
            ray.shutdown()

    def _make_group(self, args: EngineArgs) -> Any:
        import ray

        bundles = [{self._resource: 1.0} for _ in range(self._size)]
        here = [{"ray.io/node-id": self._node_id}, *({} for _ in bundles[1:])]
        self._made = ray.util.placement_group(bundles, "PACK", bundle_label_selector=here)
        if not self._made.wait(args.distributed_timeout_seconds):
            raise ConfigError(
                f"tensor_parallel_size is {self._size}, and Ray has found no {self._resource} for "
                f"each rank within {args.distributed_timeout_seconds:.0f} s, the first on this "
                f"process's node: of {_amount(ray.cluster_resources, self._resource)} in the "
                f"cluster {_amount(ray.available_resources, self._resource)} are free"
            )
        return self._made

    def _sorted_bundles(self) -> list[int]:
        """Bundles for ranks 0 and up: this node's first, those of each node together."""
        import ray

        nodes: dict[int, str] = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        bundles = sorted(nodes, key=lambda bundle: (nodes[bundle] != self._node_id, nodes[bundle]))
        if len(bundles) < self._size or nodes[bundles[0]] != self._node_id:
            raise ConfigError(
                f"tensor_parallel_size is {self._size}, and this process is in a placement group "
                f"of {len(bundles)} bundles, {list(nodes.values()).count(self._node_id)} of them "
                "on its node: a bundle is needed for each rank, the first on this node"
            )
        return bundles[: self._size]

    def _start_actor(self, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        has = self._group.bundle_specs[bundle]
        options = {
            "num_cpus": min(1.0, has.get("CPU", 0.0)),
            "num_gpus": min(1.0, has.get("GPU", 0.0)),
            "max_concurrency": 2,
            "scheduling_strategy": place,
        }
        actor = ray.remote(RankActor).options(**options).remote()
        self._actors.append(actor)
        return actor

    def _own_gpu(self) -> int:
        """Index of rank 0's GPU among those visible to this process."""
        import ray

        if self._made is None or self._resource != "GPU":
            return 0
        # An actor in its bundle reserves it.
        gpu: int = ray.get(self._start_actor(self._bundles[0]).gpu.remote())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible.split(",").index(str(gpu)) if visible else gpu


def _address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _amount(resources: Any, name: str) -> str:
    return f"{resources().get(name, 0):.0f}"


def send_at_once(connection: Connection) -> None:
    """Set TCP_NODELAY on a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as there:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
