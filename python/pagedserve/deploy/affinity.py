"""Prefix affinity: which replica probably has a prompt's prefix in its cache.

Invariants:

1. The prompts sent to a replica are stored as hashes of their blocks, each of which includes all
   blocks before it, as in the core's prefix cache.
2. Of equal prefixes the less busy replica comes first, and affinity yields to load: a fraction of
   the prompt counts as much as the same fraction of load above the mean.

Costs: a dictionary lookup per block of a prompt and replica; no remote call.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from pagedserve.inputs import Prompt

# Tokens per block, or characters if a prompt is text.
_BLOCK_TOKENS: Final = 16
_BLOCK_CHARS: Final = 64
# Minimum mean to which differences of load are related.
_FEW_REQUESTS: Final = 4.0


def prefix_keys(prompt: Prompt, adapter: str | None = None) -> tuple[int, ...]:
    """Hash each prefix of a prompt, in steps of a block; valid within this process only.

    Args:
        prompt: Text or token ids; or a mapping with either.
        adapter: Name of the adapter: prompts with different adapters share nothing.
    """
    salt: object = None
    content: object = prompt
    if isinstance(prompt, Mapping):
        salt = prompt.get("cache_salt")
        content = prompt.get("prompt_token_ids") or prompt.get("prompt") or ()
    if not isinstance(content, Sequence):
        return ()
    size = _BLOCK_CHARS if isinstance(content, str) else _BLOCK_TOKENS
    state, keys = hash((salt, adapter)), []
    for end in range(size, len(content) + 1, size):
        block = content[end - size : end]
        state = hash((state, block if isinstance(block, str) else tuple(block)))
        keys.append(state)
    return tuple(keys)


class PrefixAffinity:
    """Prompts sent to each replica, and its number of running requests."""

    def __init__(self, *, load_weight: float = 1.0, max_keys: int = 1_000_000) -> None:
        """Start empty.

        Args:
            load_weight: Weight of a load of twice the mean, relative to a completely known prompt.
            max_keys: Maximum number of stored prefixes; the least recently used are evicted.
        """
        self._load_weight = load_weight
        self._max_keys = max_keys
        self._sent: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._loads: dict[str, int] = {}
        self._num_new: dict[str, int] = {}

    def ranked(self, keys: Sequence[int], replicas: Sequence[str]) -> list[str]:
        """Sort the replicas, the best for a prompt first.

        Among those without a known prefix the least busy is best, then the one that was sent the
        fewest new prompts, since simultaneous requests see the same loads.
        """
        loads = {replica: self._loads.get(replica, 0) for replica in replicas}
        mean = max(_FEW_REQUESTS, sum(loads.values()) / max(1, len(loads)))

        def place(replica: str) -> tuple[float, int, int]:
            share = self._num_known(keys, replica) / len(keys) if keys else 0.0
            cost = self._load_weight * (loads[replica] / mean) - share
            return cost, loads[replica], self._num_new.get(replica, 0)

        return sorted(replicas, key=place)

    def begin(self, keys: Sequence[int], replica: str) -> None:
        """Record that a prompt was sent to a replica."""
        self._loads[replica] = self._loads.get(replica, 0) + 1
        if not self._num_known(keys, replica):
            self._num_new[replica] = self._num_new.get(replica, 0) + 1
        for key in keys:
            self._sent[replica, key] = None
            self._sent.move_to_end((replica, key))
        while len(self._sent) > self._max_keys:
            self._sent.popitem(last=False)

    def end(self, replica: str) -> None:
        """Record that a request of a replica has ended."""
        self._loads[replica] = max(0, self._loads.get(replica, 0) - 1)

    def keep(self, replicas: Sequence[str]) -> None:
        """Remove all but these replicas."""
        gone = {*self._loads, *self._num_new} - {*replicas}
        for replica in gone:
            self._loads.pop(replica, None)
            self._num_new.pop(replica, None)
        if gone:
            self._sent = OrderedDict((key, None) for key in self._sent if key[0] not in gone)

    def _num_known(self, keys: Sequence[int], replica: str) -> int:
        for number, key in enumerate(keys):
            if (replica, key) not in self._sent:
                return number
        return len(keys)
