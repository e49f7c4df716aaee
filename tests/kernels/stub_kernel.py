"""In the place of a Triton kernel, where no GPU is: it compiles and launches nothing."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor


class StubKernel:
    """What ``Launcher`` uses of a JITFunction.

    Args:
        interpreted: it compiles nothing, as in Triton's interpreter.
        asynchronous: it compiles in the background.

    Attributes:
        warmups: grid, number of warps and arguments of each call.
        launched: of each launch of what was compiled: the number of the variant, the grid and the
            arguments. As Triton does, it compiles a variant for each kind of arguments.
        plainly: grid, number of warps and arguments of each launch without.
    """

    def __init__(self, interpreted: bool = False, asynchronous: bool = False) -> None:
        self.interpreted, self.asynchronous = interpreted, asynchronous
        self.warmups: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.plainly: list[tuple[Any, ...]] = []
        self._variants: dict[Any, int] = {}

    @property
    def variants(self) -> int:
        return len(self._variants)

    def warmup(self, *arguments: Any, grid: Any, num_warps: int, enable_fp_fusion: bool) -> Any:
        assert not enable_fp_fusion  # each operation is rounded by itself, as on the CPU
        self.warmups.append((grid, num_warps, arguments))
        if self.interpreted:
            return None
        kind = num_warps, *map(_kind_of, arguments)
        compiled = _Compiled(self, self._variants.setdefault(kind, len(self._variants) + 1))
        return SimpleNamespace(result=lambda: compiled) if self.asynchronous else compiled

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, num_warps, **_: self.plainly.append((grid, num_warps, arguments))


class _Compiled:
    def __init__(self, kernel: StubKernel, number: int) -> None:
        self._kernel, self._number = kernel, number

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self._kernel.launched.append((self._number, grid, arguments))


def _kind_of(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    is_value = isinstance(argument, int) and not isinstance(argument, bool) and argument != 2048
    return int if is_value else str(argument)
