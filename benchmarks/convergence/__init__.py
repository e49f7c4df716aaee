"""What becomes of the loss if fewer bytes are sent?"""
