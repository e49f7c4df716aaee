"""Optimizers that shard their state over the ranks: one rank steps each parameter."""
