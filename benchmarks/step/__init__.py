"""How long does a backward take, what does it send, and how much memory does it need?"""
