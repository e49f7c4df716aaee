"""An optimizer that shards its state over the ranks: one rank steps each parameter."""
