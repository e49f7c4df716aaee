"""How cost grows with parameters and ranks, see growth.py."""
