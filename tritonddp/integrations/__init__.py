"""Adapters for frameworks that wrap the model themselves; each has a module of its own here."""
