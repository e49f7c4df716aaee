"""Optimizers whose state is spread over the ranks: each parameter is stepped by one of them."""
