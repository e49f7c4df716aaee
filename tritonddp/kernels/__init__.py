"""WITH WHAT: device code, each kernel beside its plain-torch twin. It knows no ranks."""
