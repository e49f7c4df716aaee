"""What autograd reports: start and end of a backward, and which gradients are ready."""
