"""Features that older releases of torch and Triton lack, for tests that skip by version."""

import importlib.metadata

import pytest
import torch


def _version(package: str) -> tuple[int, ...]:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(map(int, found.split(".")[:2]))


TORCH, TRITON = _version("torch"), _version("triton")


def _needs(is_here: bool, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_here, reason=f"needs {what}")


needs_grad_dtype = _needs(hasattr(torch.Tensor, "grad_dtype"), "Tensor.grad_dtype: torch 2.10")
needs_text_of_errors = _needs(TORCH >= (2, 9), "torch 2.9: dynamo says why it cannot trace")
needs_pipelines = _needs(TORCH != (2, 9), "another torch than 2.9: its pipelines fail over gloo")
HAS_QUIET_GLOO = TORCH >= (2, 11)
needs_quiet_gloo = _needs(HAS_QUIET_GLOO, "torch 2.11, whose gloo prints nothing into our lines")
needs_hook_chains = _needs(TRITON >= (3, 5), "Triton 3.5: chains of launch hooks")
COLLECTS_LIVE_STORAGES = TORCH < (2, 10)


def without_gloo(printed: str) -> str:
    """The last line of a script's output: gloo of older releases prints lines before it."""
    return printed if HAS_QUIET_GLOO else printed.splitlines(keepends=True)[-1]
