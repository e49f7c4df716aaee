"""WHERE the gradients of a bucket lie: copied, views of the buffer, in place, or rows."""
