"""What does an option cost, and does it work as documented?"""
