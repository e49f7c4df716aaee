"""All short programs: stock DDP and tritonddp must see the same after each event."""
