"""The Triton kernels of this pytest process run in Triton's interpreter: see ../conftest.py."""

import pytest


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret also what Triton itself imports late, at the first launch."""
    flatten = pytest.importorskip("tritonddp.kernels.flatten")
    # Without the interpreter a kernel would be launched on a GPU with addresses of the host.
    assert flatten.INTERPRETED, "the kernels were imported before they could be interpreted"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
