"""Request router for Ray Serve with ``PrefixAffinity``; it runs in the process of the server."""

import asyncio
from functools import partial

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedserve.deploy.affinity import PrefixAffinity
from pagedserve.deploy.replica import ReplicaRequest


class PrefixRouter(RequestRouter):
    """Routes prompts by affinity, and other calls to the least busy replica."""

    def initialize_state(self, **kwargs: object) -> None:
        """Start empty; called by Ray Serve."""
        del kwargs
        self._affinity = PrefixAffinity()
        self._replica_of: dict[str, str] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Candidates, best first, each as a separate rank."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            self._drop(pending_request.metadata.internal_request_id)  # retried: it was full
        ranked = self._affinity.ranked(_keys(pending_request), list(by_name))
        if pending_request is not None and ranked:
            # Counted now, so that simultaneous requests see each other.
            self._place(pending_request, ranked[0])
            pending_request.future.add_done_callback(
                partial(self._drop_cancelled, pending_request.metadata.internal_request_id)
            )
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Record the chosen replica, if it is not the best candidate."""
        del result
        name, request_id = replica_id.unique_id, pending_request.metadata.internal_request_id
        if self._replica_of.get(request_id) != name:
            self._drop(request_id)
            self._place(pending_request, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting the request."""
        del replica_id
        self._drop(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Remove replicas that no longer exist."""
        super().update_replicas(replicas)
        self._affinity.keep([replica.replica_id.unique_id for replica in replicas])

    def _place(self, request: PendingRequest, name: str) -> None:
        self._affinity.begin(_keys(request), name)
        self._replica_of[request.metadata.internal_request_id] = name

    def _drop(self, request_id: str) -> None:
        if (name := self._replica_of.pop(request_id, None)) is not None:
            self._affinity.end(name)

    def _drop_cancelled(self, request_id: str, sent: "asyncio.Future[RunningReplica]") -> None:
        """Stop counting a cancelled request; one that was sent is reported on completion."""
        if sent.cancelled():
            self._drop(request_id)


def _keys(pending_request: PendingRequest | None) -> tuple[int, ...]:
    if pending_request is None or not pending_request.args:
        return ()
    request = pending_request.args[0]
    return request.keys if isinstance(request, ReplicaRequest) else ()
