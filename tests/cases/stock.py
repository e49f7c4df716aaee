"""What can become of a case under stock DDP, as ``README.md`` beside this calls it.

Each case says so of itself, and ``compat/test_differences.py`` proves it.
"""

RIGHT = "right"
WRONG = "wrong"
HANGS = "hangs"
UNUSED = "finished reduction"
TWICE = "ready only once"
UNDEFINED = "undefined gradient"
ASSERTION = "internal assertion"
IN_PLACE = "in-place operation"
TWICE_HANGS = f"{TWICE}; another rank hangs"
ERRORS = {
    UNUSED: "Expected to have finished reduction in the prior iteration",
    TWICE: "Expected to mark a variable ready only once",
    UNDEFINED: "Encountered gradient which is undefined, but still allreduced by DDP reducer",
    ASSERTION: "INTERNAL ASSERT FAILED",
    IN_PLACE: "a leaf Variable that requires grad is being used in an in-place operation",
    HANGS: "gloo/transport|timeout",  # of the rank that waits until its time is up
}
