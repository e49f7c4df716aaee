"""Adapters for frameworks that wrap a model themselves."""
