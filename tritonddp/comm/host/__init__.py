"""Buckets and buffers that go through memory which the ranks of one host share."""
