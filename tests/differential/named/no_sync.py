"""``no_sync`` around any part of a step, and what frameworks do instead."""

from typing import Any

from oracle import Net
from torch import Tensor, nn

from differential.named.models import Branches, batch
from differential.named.table import RIGHT, TWICE, UNUSED, program


@program(UNUSED, RIGHT)
def no_sync_around_the_forward(net: Net, rank: int, step: int) -> None:
    """As mmengine's ``optim_context`` does: the backward runs after the context."""
    for names in ("abc", "bd"):
        with net.no_sync():
            loss = net(batch(), names).sum()
        loss.backward()
    net(batch(), "abc").sum().backward()


@program(UNUSED, RIGHT)
def no_sync_around_the_backward(net: Net, rank: int, step: int) -> None:
    loss = net(batch(), "abc").sum()
    with net.no_sync():
        loss.backward()
    net(batch(), "bcd").sum().backward()


@program(UNUSED, RIGHT)
def flag_set_by_hand(net: Net, rank: int, step: int) -> None:
    """As nanoGPT does: before the forward of each microbatch."""
    for microbatch in range(3):
        net.require_backward_grad_sync = microbatch == 2
        net(batch(), "abc" if rank else "acd").sum().backward()


class PreparesInside(Branches):
    """Runs its backward in its forward, as a LightningModule with manual optimization.

    Lightning calls the reducer of the wrapper before it, and prevents the call at the end of the
    forward of the wrapper.
    """

    wrapper: list[Net]

    def forward(self, x: Tensor, names: str, backward: bool = True) -> Any:
        loss = super().forward(x, names).sum()
        if backward:
            self.manual_backward(loss)
            return None
        return loss

    def manual_backward(self, loss: Tensor) -> None:
        net: Any = self.wrapper[0]
        if isinstance(net, nn.parallel.DistributedDataParallel):
            net.require_forward_param_sync = net.require_backward_grad_sync
            if net.require_backward_grad_sync:
                net.reducer._rebuild_buckets()
                net.reducer.prepare_for_backward([loss] if net.find_unused_parameters else [])
        loss.backward()
        net.require_backward_grad_sync = False

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "ace" if rank else "bd", backward=False)


@program(RIGHT, RIGHT, model=PreparesInside)
def lightning_prepares_the_reducer(net: Net, rank: int, step: int) -> None:
    net.module.wrapper = [net]  # in a list: it is no submodule
    net(batch(), "abcdef")
    net.require_backward_grad_sync = True


@program(RIGHT, TWICE)
def accelerate_triggers_the_synchronization(net: Net, rank: int, step: int) -> None:
    """``accelerator.trigger_sync_in_backward(model)``, around the last of several backwards."""
    with net.no_sync():
        losses = [net(batch(), "abcdef").sum() for _ in range(3)]
        for loss in losses[:2]:
            loss.backward()
    if not isinstance(net, nn.parallel.DistributedDataParallel):
        losses[2].backward()
        return
    before = net.require_backward_grad_sync, net.require_forward_param_sync
    net.require_backward_grad_sync = net.require_forward_param_sync = True
    net.reducer.prepare_for_backward([])
    losses[2].backward()
    net.require_backward_grad_sync, net.require_forward_param_sync = before


@program(RIGHT, TWICE, reductions=2)
def prepared_inside_a_window(net: Net, rank: int, step: int) -> None:
    """As sentence-transformers' GradCache does; the next microbatch is local again."""
    for microbatch in range(3):
        with net.no_sync():
            loss = net(batch(), "abcdef").square().sum()
            if microbatch == 1:
                if isinstance(net, nn.parallel.DistributedDataParallel):
                    net.reducer.prepare_for_backward([])
                loss.backward()
        if microbatch != 1:
            loss.backward()
    net(batch(), "abcdef").square().sum().backward()
