"""WHEN: one backward, from its first hook to its last bucket."""
