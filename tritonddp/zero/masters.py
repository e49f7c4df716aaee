"""fp32 copies of parameters in low precision, which the optimizer steps instead of them.

An update that is smaller than half of a parameter's last bit is lost in bf16: with a learning rate
of 1e-4 that is most of them (Micikevicius et al., Mixed Precision Training, 2017, arXiv
1710.03740, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._modes import outside_modes
from tritonddp._torch import foreach_copy_

_LOW = (torch.bfloat16, torch.float16)
_UNKNOWN = -1  # no version of a tensor


class MasterWeights:
    """The fp32 copies of the parameters in low precision that this rank owns."""

    def __init__(self) -> None:
        # By parameter, what the optimizer steps: the copy, or the parameter itself.
        self.of: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}  # of parameters with a copy, after the last step

    def add(self, params: Iterable[Tensor]) -> None:
        """Make copies of those of ``params`` that are bf16 or fp16."""
        for param in params:
            if param not in self.of:
                is_low = param.dtype in _LOW
                self.of[param] = param
                if is_low:
                    with outside_modes([param]):
                        self.of[param] = Parameter(param.detach().float())
                    self._versions[param] = param._version

    def remove(self, params: Iterable[Tensor]) -> None:
        """Forget the copies of those of ``params`` that have one."""
        for param in params:
            self.of.pop(param, None)
            self._versions.pop(param, None)

    def before_step(self) -> None:
        """Give each copy the gradient of its parameter, which may be fp32 itself (``grad_dtype``).

        A parameter that somebody else has written to since the last step, such as a checkpoint that
        was loaded, counts: its copy takes the elements that are not the rounded ones.
        """
        for param, version in self._versions.items():
            copy = self.of[param]
            if param._version != version:
                copy.copy_(torch.where(copy.to(param.dtype) == param, copy, param.float()))
            copy.grad = None if param.grad is None else param.grad.float()

    def after_step(self) -> None:
        """Write the rounded copies to their parameters."""
        params = list(self._versions)
        if params:
            copies = [self.of[param] for param in params]
            foreach_copy_([param.detach() for param in params], copies)
        for param in params:
            self.of[param].grad = None
            self._versions[param] = param._version

    def load(self, param: Tensor, value: Tensor) -> None:
        """Go on with this copy of ``param``, fp32, where its rounded values are those of ``param``.

        By the next step: the parameters may be loaded later.
        """
        if param in self._versions:
            self.of[param].data.copy_(value)
            self._versions[param] = _UNKNOWN
