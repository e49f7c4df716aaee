"""compression="auto": measured speeds decide which buckets are compressed."""
