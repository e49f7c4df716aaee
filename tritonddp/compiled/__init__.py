"""Single-graph compilation: the traced forward, and gradients announced by its backward."""
