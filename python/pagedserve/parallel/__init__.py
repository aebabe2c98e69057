"""Tensor parallelism: the group of ranks, the sharding plan, and shards as modules."""
