"""WHAT IS SEEN: timelines, checksums, stock's logging data, the debug log."""
