"""Diagnostics: checksums, stock DDP's logging data, reports of stuck ranks."""
