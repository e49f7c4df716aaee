"""A driver of CUDA that does nothing, so that the host's part of a launch runs where no GPU is.

Triton compiles for an architecture without one. Its own Python runs down to the function in C that
launches; that, and what else asks the driver, are here functions in C that do nothing. Tensors are
on the CPU. What a GPU's driver takes itself (some 5 us a launch) is not seen.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from tritonddp import _torch

# In C, take any arguments, and none, and return "" and 0.
LAUNCH: Callable[..., Any] = "".format
_ZERO = int

_PROPERTIES = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


@contextlib.contextmanager
def faked_driver(capability: int = 90, launch: Callable[..., Any] = LAUNCH) -> Iterator[None]:
    """Context: Triton finds one GPU, and launches by ``launch``; the GPU is the current one.

    ``launch`` takes what Triton's function in C of that name takes.
    """
    utils = SimpleNamespace(
        launch=launch,
        build_signature_metadata=lambda _: b"",
        load_binary=lambda *_: (1, 1, 30, 0, 1024),
        unload_module=lambda *_: None,
        get_device_properties=lambda _: _PROPERTIES,
    )
    driver = SimpleNamespace(
        utils=utils,
        launcher_cls=nvidia.CudaLauncher,
        # As torch's are, one in Python and one in C.
        get_current_device=torch.cuda.current_device,
        get_current_stream=abs,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        allocate_default_profile_scratch=lambda *_: None,
    )
    patches = {
        "annotate_arguments": lambda signature: list(signature),
        # Up to Triton 3.6 each kernel has a launcher in C of its own.
        "library_dirs": list,
        "compile_module_from_src": lambda **_: SimpleNamespace(launch=launch),
    }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            if hasattr(nvidia, name):
                stack.enter_context(mock.patch.object(nvidia, name, value))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(mock.patch.object(torch.cuda, "_initialized", True))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getDevice", _ZERO, create=True))
        # Where CUDA is built in, the same function.
        stack.enter_context(mock.patch.object(_torch, "current_device", _ZERO))
        yield
