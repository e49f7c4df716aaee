"""WITH WHAT: device code, each Triton kernel beside the same in plain torch. It knows no ranks."""
