"""WHERE: which parameters exist, which bucket holds each one, and at which position."""
