"""Which modules are wrapped, how, and do all wrappers produce the same gradients?"""
