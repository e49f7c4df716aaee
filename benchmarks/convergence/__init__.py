"""How does sending fewer bytes affect the loss?"""
