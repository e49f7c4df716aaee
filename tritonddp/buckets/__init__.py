"""The parameters of a module, and the bucket and position of each."""
