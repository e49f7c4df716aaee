"""WITH WHAT: exchanges other than gradients, and error messages that name missing ranks."""
