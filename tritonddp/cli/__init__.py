"""What is typed in a shell: ``tritonddp run``, ``compare`` and ``doctor``."""
