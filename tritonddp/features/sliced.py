"""Parameters that tensor parallelism shards over another dimension of the device mesh.

The module then holds DTensors, whose gradients would be DTensors too. Each DTensor is replaced by a
parameter that is its local part. While the module or one of its submodules runs, a DTensor is made
from the local part, and autograd passes the gradient on to the local part. Stock DDP does not
restore the parameters: after the first forward, the module has none, and ``state_dict()`` lacks
them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_REPLACED = "_tritonddp_replaced"
# Step hook of all optimizers, which finds those with replaced parameters. Registered when needed.
_hooks: list[Any] = []


def _dtensor() -> type[DTensor]:
    """Import DTensor lazily: it imports SymPy, which takes longer than this package."""
    from torch.distributed.tensor import DTensor

    return DTensor


class _Layout(NamedTuple):
    """The properties of a DTensor in addition to its local part."""

    mesh: Any
    placements: Any
    shape: Any
    stride: Any

    @classmethod
    def of(cls, tensor: DTensor) -> _Layout:
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def whole(self, local: Tensor) -> DTensor:
        """Return the DTensor with this local part."""
        return _dtensor().from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def __deepcopy__(self, _: Any) -> _Layout:
        return self  # a copy of the module has the same mesh


class _Parts:
    """The parameters of one module, without its submodules, that are local parts."""

    def __init__(self, table: dict[str, Any], layouts: dict[str, _Layout]) -> None:
        self._table = table  # all parameters of the module
        self._layouts = layouts  # layouts of the DTensors
        self._local: dict[str, Parameter] = {}  # local parts, while DTensors replace them
        self._running = 0  # number of nested forwards

    def begin(self, *_: Any) -> None:
        """Replace local parts by DTensors at the start of a forward."""
        self._running += 1
        if self._running == 1:
            self._local = {name: self._table[name] for name in self._layouts}
            for name, layout in self._layouts.items():
                self._table[name] = layout.whole(self._local[name])

    def end(self, *_: Any) -> None:
        """Restore the local parts after a forward, including a failed one."""
        self._running -= 1
        if self._running == 0:
            self._table.update(self._local)

    def save(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """Save DTensors in checkpoints, as without data parallelism."""
        for name, layout in self._layouts.items():
            if (local := state.get(prefix + name)) is not None:
                state[prefix + name] = layout.whole(local)

    def load(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """Load the local parts of saved DTensors."""
        for name in self._layouts:
            if isinstance(saved := state.get(prefix + name), _dtensor()):
                state[prefix + name] = saved.to_local()


def localize(module: nn.Module) -> None:
    """Replace all DTensors among the parameters of ``module`` by their local parts.

    Create optimizers afterwards: an optimizer with replaced parameters raises a RuntimeError when
    it steps.
    """
    local_of: dict[Tensor, Parameter] = {}  # a parameter may have several names
    for owner in module.modules():
        table: dict[str, Any] = owner._parameters
        found = {name: param for name, param in table.items() if isinstance(param, _dtensor())}
        if not found:
            continue
        for name, param in found.items():
            if param not in local_of:
                local_of[param] = Parameter(param.to_local().detach(), param.requires_grad)
                setattr(param, _REPLACED, True)
            table[name] = local_of[param]
        layouts = {name: _Layout.of(param) for name, param in found.items()}
        parts = _Parts(table, layouts)
        owner.register_state_dict_post_hook(partial(_Parts.save, parts))
        owner.register_load_state_dict_pre_hook(parts.load)
        for each in dict.fromkeys((module, owner)):
            each.register_forward_pre_hook(parts.begin, prepend=True)
            each.register_forward_hook(parts.end, always_call=True)
    if local_of and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_replaced))


def _refuse_replaced(optimizer: Optimizer, *_: Any) -> None:
    """Pre-step hook of all optimizers."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, _dtensor()) and hasattr(param, _REPLACED):
                raise RuntimeError(
                    f"this {type(optimizer).__name__} was created before its parameters were "
                    "replaced by local parts (data parallelism in one dimension of a larger "
                    "mesh), so its steps have no effect: create the optimizer after replicating "
                    "or wrapping the module"
                )
