"""Shared by all benchmarks: processes with a time limit, ranks, deadlines, results."""
