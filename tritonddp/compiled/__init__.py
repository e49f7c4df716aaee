"""One graph: what torch.compile traces of a wrapper, and how its backward announces gradients."""
