"""HOW: a bucket becomes a mean over the ranks."""
