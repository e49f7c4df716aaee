"""How fast are the kernels, beside a plain copy of the same bytes?"""
