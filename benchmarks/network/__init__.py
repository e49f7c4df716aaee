"""How long do steps take between hosts on slow networks, and exchanges within a host?"""
