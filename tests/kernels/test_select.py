"""Which kernels a device gets, and what is said where there are none."""

import dataclasses

import pytest
import torch
from launched import printed

from tritonddp.kernels import reference
from tritonddp.kernels.dispatch import select

WITHOUT_TRITON = """
    import sys

    class NoTriton:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "triton":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoTriton())
    import torch
    from tritonddp.kernels.dispatch import select
"""


def test_cpu_tensors_get_the_reference_even_under_the_interpreter():
    kernels = select(torch.device("cpu"))
    assert kernels.flatten is reference.flatten
    assert kernels.unflatten is reference.unflatten
    assert kernels.alignment == reference.ALIGNMENT


def test_the_choice_is_made_once_and_cannot_be_changed():
    kernels = select(torch.device("cpu"))
    assert select(torch.device("cpu")) is kernels
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernels.alignment = 2


@pytest.mark.parametrize("device", ["meta", "mps", "xpu"])
def test_an_unsupported_device_is_named_with_the_supported_ones(device):
    with pytest.raises(RuntimeError, match=f"'{device}'.*'cuda'.*'cpu'"):
        select(torch.device(device))


def test_cuda_tensors_are_refused_under_the_interpreter():
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        select(torch.device("cuda", 0))


def test_cuda_tensors_get_the_triton_kernels():
    out = printed(
        """
        import torch
        from tritonddp.kernels.dispatch import select
        kernels = select(torch.device("cuda", 0))
        print(kernels.flatten.__module__, kernels.unflatten.__module__, kernels.alignment)
        assert select(torch.device("cuda", 1)) is kernels
        """
    )
    names = "tritonddp.kernels.flatten tritonddp.kernels.unflatten 16"
    assert out.split() == names.split()


@pytest.mark.long
def test_cuda_tensors_are_quantised_by_the_triton_kernels():
    out = printed(
        """
        import torch
        from tritonddp.kernels.dispatch import select_quantized
        kernels = select_quantized(torch.device("cuda", 0))
        for each in (kernels.quantize, kernels.reduce_parts, kernels.unflatten):
            print(each.__module__, each.__name__)
        """
    )
    assert out.splitlines() == [
        "tritonddp.kernels.quantized.quantize quantize",
        "tritonddp.kernels.quantized.reduce_parts reduce_parts",
        "tritonddp.kernels.quantized.dequantize dequantize",
    ]


def test_without_triton_the_cpu_still_works():
    out = printed(
        WITHOUT_TRITON
        + """
    print(select(torch.device("cpu")).flatten.__module__)
    """
    )
    assert out == "tritonddp.kernels.reference"


def test_without_triton_cuda_is_an_error_that_says_what_to_install():
    out = printed(
        WITHOUT_TRITON
        + """
    try:
        select(torch.device("cuda", 0))
    except RuntimeError as error:
        print(error)
    """
    )
    assert "pip install 'triton>=3.6'" in out
    assert "No module named 'triton'" in out


def test_the_cpu_path_does_not_import_triton():
    out = printed(
        """
        import sys, torch
        from tritonddp.kernels.dispatch import select
        select(torch.device("cpu"))
        print([name for name in sys.modules if name.startswith("tritonddp.kernels.")])
        """
    )
    assert "flatten" not in out.replace("unflatten", "flatten")
