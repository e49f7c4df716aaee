"""WITH WHAT: device code. Each Triton kernel has a twin in plain torch. It knows no ranks."""
