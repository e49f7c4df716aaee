"""All measurements and tests that need a GPU, in one command."""
