"""Features in addition to the plain mean of gradients. Most are off by default."""
