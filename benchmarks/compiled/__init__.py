"""How long do steps under torch.compile take?"""
