"""How long do kernels take, beside torch's own operations and a plain copy of the same bytes?"""
