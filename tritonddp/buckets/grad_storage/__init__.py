"""Storage of a bucket's gradients: separate tensors, views of the buffer, or sparse rows."""
