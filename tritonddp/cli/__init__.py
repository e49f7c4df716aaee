"""The shell commands ``tritonddp run``, ``compare`` and ``doctor``."""
