"""A backward that goes through no forward of the wrapper is this rank's own affair."""
