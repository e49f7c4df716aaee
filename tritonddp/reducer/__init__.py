"""One backward, from its first hook to its last bucket, and what follows a reduction."""
