"""Tensors that are kept for later steps, whatever mode the user's code runs in meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp import _torch


@contextmanager
def outside_modes(given: Iterable[Tensor] = ()) -> Iterator[None]:
    """Context: what is made inside may be kept. Entered where something is made, not in each step.

    The first forward may be one for validation under ``inference_mode``, whose tensors nobody may
    write to afterwards; or run under ``FakeTensorMode``, a mode of the user's, ``torch.device`` or
    a transform of ``torch.func``, whose tensors are of no use outside. So all of these are left.

    Args:
        given: what is made has to go with these tensors. Those of a subclass need their modes,
            which are kept then.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if {Tensor, Parameter}.issuperset(map(type, given)):
            stack.enter_context(_torch.without_transforms())
            stack.enter_context(_torch.without_function_modes())
            stack.enter_context(_torch.without_dispatch_modes())
        yield
