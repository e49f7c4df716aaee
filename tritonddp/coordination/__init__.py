"""WITH WHAT: what ranks exchange beside gradients, and error messages that name missing ranks."""
