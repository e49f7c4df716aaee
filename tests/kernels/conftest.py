"""The Triton kernels of this pytest process run in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # The variable counts when @triton.jit runs, so the kernels are imported under it, before any
    # test module is, and taken back: processes that other tests start want compiled kernels.
    # `pytest -m gpu` runs none of the tests here and does want them compiled in this process.
    if config.getoption("markexpr") == "gpu":
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import tritonddp.kernels.dequantize
        import tritonddp.kernels.flatten
        import tritonddp.kernels.quantize
        import tritonddp.kernels.reduce_parts
        import tritonddp.kernels.unflatten  # noqa: F401
    except ImportError as error:
        if error.name != "triton":
            raise
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret also what Triton itself imports late, at the first launch."""
    flatten = pytest.importorskip("tritonddp.kernels.flatten")
    # Without the interpreter a kernel would be launched on a GPU with addresses of the host.
    assert flatten.INTERPRETED, "the kernels were imported before they could be interpreted"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
