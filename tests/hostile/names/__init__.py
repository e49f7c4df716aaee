"""The names on the wrapper are the user's, and a module may be TorchScript."""
