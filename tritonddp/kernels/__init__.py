"""WITH WHAT: device code, independent of ranks. Each Triton kernel has a twin in plain torch."""
