"""WHERE: which parameters there are, which bucket each is in, and where it lies there."""
