"""fp32 copies of low-precision parameters, which the optimizer steps in their place.

bf16 loses an update that is smaller than half of a parameter's last bit. With a learning rate of
1e-4, these are most updates (Micikevicius et al., Mixed Precision Training, 2017, arXiv 1710.03740,
section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._modes import outside_modes
from tritonddp._torch import foreach_copy_

_LOW = (torch.bfloat16, torch.float16)
_UNKNOWN = -1  # not a version of any tensor


class MasterWeights:
    """The fp32 copies of the low-precision parameters that this rank owns."""

    def __init__(self) -> None:
        # For each parameter, the tensor that the optimizer steps: the copy or the parameter itself.
        self.of: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}  # versions of copied parameters after the last step

    def add(self, params: Iterable[Tensor]) -> None:
        """Copy the bf16 and fp16 parameters of ``params``."""
        for param in params:
            if param not in self.of:
                is_low = param.dtype in _LOW
                self.of[param] = param
                if is_low:
                    with outside_modes([param]):
                        self.of[param] = Parameter(param.detach().float())
                    self._versions[param] = param._version

    def remove(self, params: Iterable[Tensor]) -> None:
        """Remove the copies of ``params``."""
        for param in params:
            self.of.pop(param, None)
            self._versions.pop(param, None)

    def before_step(self) -> None:
        """Give each copy the gradient of its parameter, which may be fp32 too (``grad_dtype``).

        If a parameter was written since the last step, for example by loading a checkpoint, its
        copy takes the elements that differ from the rounded copy.
        """
        for param, version in self._versions.items():
            copy = self.of[param]
            if param._version != version:
                copy.copy_(torch.where(copy.to(param.dtype) == param, copy, param.float()))
            copy.grad = None if param.grad is None else param.grad.float()

    def after_step(self) -> None:
        """Write the rounded copies to the parameters."""
        params = list(self._versions)
        if params:
            copies = [self.of[param] for param in params]
            foreach_copy_([param.detach() for param in params], copies)
        for param in params:
            self.of[param].grad = None
            self._versions[param] = param._version

    def load(self, param: Tensor, value: Tensor) -> None:
        """Load the fp32 copy of ``param``; elements that do not round to ``param`` are dropped.

        The next step compares the two, because the parameters may be loaded later.
        """
        if param in self._versions:
            self.of[param].data.copy_(value)
            self._versions[param] = _UNKNOWN
