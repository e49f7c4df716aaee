"""Which of two wrappers is faster, and do they do the same? One script, both wrappers, in turns."""
