"""New values of parameters that are still under way when ``step()`` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from tritonddp._torch import function_modes, pop_function_mode, push_function_mode, tree_leaves
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward
from tritonddp.zero.values import OwnedValues

# Of a tensor: attributes that give or take its values. All other ones can be used meanwhile.
_VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}
_PROPERTY = {"__get__", "__set__", "__delete__"}
# Methods that neither read nor write values.
_HARMLESS = {
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "nelement",
    "ndimension",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "stride",
}


class WaitingUsers(TorchFunctionMode):
    """While values are under way, the first function that is given a parameter waits for its value.

    torch shows a mode the calls of its functions, in Python, on the thread that has entered it:
    those of a forward, and also those of ``state_dict()`` or of a copy of the weights. This one is
    below all others of the thread, which may begin and end meanwhile. Code in C++ is not seen, so a
    module that is called has the parameters that it holds itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: OwnedValues | None = None  # while some are under way
        self._under_way: dict[Tensor, int] = {}
        self._thread = 0
        self._waiting = RLock()  # modules may be called by several threads
        self._hook: Any = None

    def begin(self, values: OwnedValues) -> None:
        """See what is called from now on, on this thread."""
        self._values, self._under_way = values, values.under_way()
        self._thread = get_ident()
        self._hook = register_module_forward_pre_hook(self._before_forward)
        _change_modes(self._among)

    def _among(self, modes: list[Any]) -> list[Any]:
        """These modes, with this one below all but torch's default device, which is the first."""
        others = [each for each in modes if each is not self]
        at = int(bool(others) and type(others[0]).__name__ == "DeviceContext")
        return [*others[:at], self, *others[at:]]

    def end(self) -> None:
        """Wait for all values.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        with self._waiting:
            # First: after Ctrl-C in the wait there is still somebody who waits.
            if self._values is not None:
                self._values.wait()
            self._values, self._under_way = None, {}
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
        # (Another thread cannot leave it, nor a function of torch that it was shown, such as a
        # backward. It has nothing to do then.)
        if self in function_modes():
            _change_modes(lambda modes: [each for each in modes if each is not self])

    def end_on_other_threads(self) -> None:
        """Wait for all values if the mode does not see this thread."""
        if self._values is not None and get_ident() != self._thread:
            self.end()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for the parameters among the arguments, and call the function."""
        kwargs = kwargs or {}
        if self._under_way and _uses_values(func):
            for each in (*args, *kwargs.values()):
                if isinstance(each, Tensor):
                    self._use(each)
                elif isinstance(each, list | tuple | dict):
                    for leaf in tree_leaves(each):
                        if isinstance(leaf, Tensor):
                            self._use(leaf)
        return func(*args, **kwargs)

    def _use(self, tensor: Tensor) -> None:
        if tensor in self._under_way:
            with self._waiting:
                number = self._under_way.get(tensor)
                if number is not None and self._values is not None:
                    self._values.wait(number)
                    del self._under_way[tensor]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        # (TorchScript runs its submodules in C++.)
        for param in module.parameters(recurse=isinstance(module, torch.jit.ScriptModule)):
            self._use(param)


class WaitsBeforeBackward(Extension):
    """A backward begins with all values there, and so does a forward on another thread.

    Args:
        users: those who wait.
    """

    def __init__(self, users: WaitingUsers) -> None:
        self._users = users

    def on_forward(self) -> None:
        """See :meth:`Extension.on_forward`."""
        self._users.end_on_other_threads()

    def on_begin(self, backward: Backward) -> None:
        """See :meth:`Extension.on_begin`."""
        self._users.end()


def _uses_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _PROPERTY:
        return getattr(getattr(func, "__self__", None), "__name__", "data") in _VALUES
    return name not in _HARMLESS


def _change_modes(change: Callable[[list[Any]], list[Any]]) -> None:
    """Replace the modes of this thread, from the first one on."""
    modes = list(function_modes())
    for _ in modes:
        pop_function_mode()
    for each in change(modes):
        push_function_mode(each)
