"""Create tensors that are kept for later steps, independent of the user's current modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp import _torch


@contextmanager
def outside_modes(given: Iterable[Tensor] = ()) -> Iterator[None]:
    """Context in which to create tensors that outlive a step. Not entered in each step.

    The first forward may be a validation under ``inference_mode``, whose tensors cannot be written
    to afterwards. It may also run under ``FakeTensorMode``, a mode of the user, ``torch.device`` or
    a transform of ``torch.func``, whose tensors are useless outside. So this context leaves all of
    these.

    Args:
        given: tensors with which the new tensors must be compatible. If one is a tensor
            subclass, modes and transforms stay active, since it may need them.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if {Tensor, Parameter}.issuperset(map(type, given)):
            stack.enter_context(_torch.without_transforms())
            stack.enter_context(_torch.without_function_modes())
            stack.enter_context(_torch.without_dispatch_modes())
        yield
