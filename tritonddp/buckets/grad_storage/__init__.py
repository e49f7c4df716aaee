"""WHERE the gradients of a bucket are stored: copied, views of the buffer, in place, or rows."""
