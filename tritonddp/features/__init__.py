"""What is off by default."""
