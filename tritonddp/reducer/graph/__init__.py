"""What autograd tells: where a backward begins and ends, and which gradients come."""
