"""What is wrapped, in which ways, and whether all of them make the same gradients?"""
