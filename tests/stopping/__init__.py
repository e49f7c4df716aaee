"""Ranks get signals at any moment of training, a thousand times: all stop after the same step."""
