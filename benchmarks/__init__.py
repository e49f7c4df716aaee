"""The cost of tritonddp compared with stock DDP, measured in one run: see README.md."""
