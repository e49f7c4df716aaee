"""What all benchmarks share: processes with a time limit, ranks, deadlines, results."""
