"""Adapters for frameworks that wrap models."""
