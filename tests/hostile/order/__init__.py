"""Wrappers with a group each, in any order, and waits that come before a launch."""
