"""Ranks of one host: how they find each other, and what they share."""
