"""How fast are the kernels compared with a plain copy of the same bytes?"""
