"""Prompts go where their beginning is known, as long as that is not far busier."""

import random
from collections import Counter
from typing import Any

import pytest

from pagedserve.deploy.affinity import PrefixAffinity, prefix_keys

REPLICAS = ["a", "b", "c"]


def prompt(group: int, question: int) -> list[int]:
    """A long beginning that a group shares, and a question of its own."""
    return [group * 1000 + place for place in range(160)] + [7, question]


def send(affinity: PrefixAffinity, token_ids: list[int], replicas: list[str] = REPLICAS) -> str:
    keys = prefix_keys(token_ids)
    replica = affinity.ranked(keys, replicas)[0]
    affinity.begin(keys, replica)
    return replica


def test_every_repeated_prefix_stays_with_its_replica_at_equal_load() -> None:
    affinity = PrefixAffinity()
    homes = {group: send(affinity, prompt(group, 0)) for group in range(12)}
    assert set(Counter(homes.values()).values()) == {4}, "prompts of one moment are spread"
    for replica in homes.values():
        affinity.end(replica)
    source = random.Random(0)
    for question in range(1, 40):
        group = source.randrange(12)
        replica = send(affinity, prompt(group, question))
        assert replica == homes[group]
        affinity.end(replica)


def test_a_hot_prefix_spreads() -> None:
    affinity = PrefixAffinity()
    found = Counter(send(affinity, prompt(0, question)) for question in range(60))
    assert set(found) == set(REPLICAS)
    assert max(found.values()) - min(found.values()) <= 22
    # Once it has spread, all of them know it: the least busy is taken.
    assert affinity.ranked(prefix_keys(prompt(0, 99)), REPLICAS)[0] == min(
        REPLICAS, key=lambda replica: affinity._loads[replica]
    )


def test_prompts_that_nobody_knows_go_to_the_least_busy() -> None:
    affinity = PrefixAffinity()
    for _ in range(3):
        affinity.begin((), "a")
    affinity.begin((), "b")
    assert affinity.ranked(prefix_keys([1, 2, 3]), REPLICAS) == ["c", "b", "a"]


def test_the_longer_of_two_known_beginnings_wins() -> None:
    affinity = PrefixAffinity()
    affinity.begin(prefix_keys(prompt(0, 0)[:48]), "b")
    affinity.begin(prefix_keys(prompt(0, 0)), "c")
    affinity.end("b")
    affinity.end("c")
    assert affinity.ranked(prefix_keys(prompt(0, 5)), REPLICAS)[0] == "c"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    affinity = PrefixAffinity()
    home = send(affinity, prompt(0, 0))
    others = [replica for replica in REPLICAS if replica != home]
    affinity.keep(others)
    affinity.keep(REPLICAS)  # one of that name is not that one
    assert not any(key[0] == home for key in affinity._sent)
    assert affinity.ranked(prefix_keys(prompt(0, 1)), REPLICAS) == REPLICAS


def test_what_is_remembered_is_bounded() -> None:
    affinity = PrefixAffinity(max_keys=30)
    for group in range(50):
        affinity.end(send(affinity, prompt(group, 0)))
    assert len(affinity._sent) == 30
    home = affinity.ranked(prefix_keys(prompt(49, 1)), REPLICAS)[0]
    assert (home, prefix_keys(prompt(49, 0))[0]) in affinity._sent


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": [*range(1, 161)]},
        {"prompt_token_ids": [*range(160)], "cache_salt": "tenant"},
        {"prompt": "0" * 400},
    ],
)
def test_what_shares_no_blocks_shares_no_keys(other: Any) -> None:
    keys = prefix_keys([*range(160)])
    assert prefix_keys({"prompt_token_ids": [*range(160)]}) == keys
    assert len(keys) == 10
    assert not set(prefix_keys(other)) & set(keys)
    assert not set(prefix_keys([*range(160)], "adapter")) & set(keys)


def test_texts_have_keys_too() -> None:
    text = "You are a helpful assistant. " * 20
    keys = prefix_keys(text + "Hello")
    assert keys[:-1] == prefix_keys({"prompt": text})[: len(keys) - 1]
    assert prefix_keys("short") == ()
