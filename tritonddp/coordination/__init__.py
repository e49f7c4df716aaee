"""Exchanges between ranks other than of gradients, and errors that name missing ranks."""
