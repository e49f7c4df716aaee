"""Exchange of buckets and buffers through memory that the ranks of one host share."""
