"""Which kernels a device gets, and the error if there are none."""

import pytest
import torch
from launched import printed

from tritonddp.kernels.dispatch import select


def test_an_error_names_the_supported_devices_and_the_interpreter():
    for device in ("meta", "mps", "xpu"):
        with pytest.raises(RuntimeError, match=f"'{device}'.*'cuda'.*'cpu'"):
            select(torch.device(device))
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        select(torch.device("cuda", 0))


def test_a_gpu_has_the_kernels_in_triton():
    out = printed(
        """
        import torch
        from tritonddp.kernels.dispatch import select, select_quantized
        device = torch.device("cuda", 0)
        print(select(device).flatten.__module__, select_quantized(device).quantize.__module__)
        """
    )
    assert out == "tritonddp.kernels.flatten tritonddp.kernels.quantized.quantize"


def test_without_triton_the_cpu_works_and_cuda_is_an_error_that_says_what_to_install():
    out = printed(
        """
        import sys
        sys.modules["triton"] = None  # its import raises ModuleNotFoundError
        import torch
        from tritonddp.kernels.dispatch import select
        print(select(torch.device("cpu")).flatten.__module__)
        try:
            select(torch.device("cuda", 0))
        except RuntimeError as error:
            print(error)
        """
    )
    assert out.startswith("tritonddp.kernels.reference\n")
    assert "pip install 'triton>=3.6'" in out
