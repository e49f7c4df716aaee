"""What is typed in a shell: ``tritonddp run``, ``compare``, ``doctor`` and ``bench``."""
