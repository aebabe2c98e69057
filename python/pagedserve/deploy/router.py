"""Ray Serve's requests by ``PrefixAffinity``; a router lives where the requests come from."""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedserve.deploy.affinity import PrefixAffinity
from pagedserve.deploy.replica import ReplicaRequest


class PrefixRouter(RequestRouter):
    """Asks the affinity of each prompt; other calls go to the least busy."""

    def initialize_state(self, **kwargs: object) -> None:
        """Begin with nothing; called by Ray Serve."""
        del kwargs
        self._affinity = PrefixAffinity()
        self._replica_of: dict[str, str] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first, each a rank of its own."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._affinity.ranked(_keys(pending_request), list(by_name))
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Remember what a replica was sent."""
        del result
        name = replica_id.unique_id
        self._affinity.begin(_keys(pending_request), name)
        self._replica_of[pending_request.metadata.internal_request_id] = name

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count what a replica is at work on."""
        if self._replica_of.pop(internal_request_id, None) is not None:
            self._affinity.end(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget those that are gone."""
        super().update_replicas(replicas)
        self._affinity.keep([replica.replica_id.unique_id for replica in replicas])


def _keys(pending_request: PendingRequest | None) -> tuple[int, ...]:
    if pending_request is None or not pending_request.args:
        return ()
    request = pending_request.args[0]
    return request.keys if isinstance(request, ReplicaRequest) else ()
