"""How a bucket is reduced, and how initial state and module buffers are synchronised."""
