"""A model shared by several processes: their group, the model's plan, and its shards as modules."""
