"""What tritonddp takes, beside stock DDP, measured in one run: see README.md."""
