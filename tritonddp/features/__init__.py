"""Features beside the plain mean of gradients. Most are off by default."""
