"""How long do steps take between hosts on slow lines, and exchanges within a host?"""
