"""On a GPU all ranks find at the same place that they do not reduce the same: none hangs."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks

from recording.device import recording
from recording.programs import WARM_UP, Net
from tritonddp import DistributedDataParallel, replicate


def warmed_up(net: Any, x: torch.Tensor) -> Callable[[], None]:
    """A function that makes a step, after some."""

    def step() -> None:
        net.zero_grad()
        net(x).sum().backward()

    for _ in range(WARM_UP):
        step()
    return step


@pytest.mark.parametrize(
    ("what", "said"),
    [("weighted", "the mean is weighted on some ranks only"), ("frozen", "third.weight")],
)
@ranks(2, interprets=True)
def test_a_step_that_one_rank_makes_otherwise(what: str, said: str) -> None:
    """Its header alone is new. The buffers' broadcast in the next forward needs both ranks."""
    with recording():
        torch.manual_seed(0)
        net = DistributedDataParallel(Net(batch_norm=True).to("cuda"), bucket_cap_mb=6e-4)
        x = torch.randn(5, 6).to("cuda")
        step = warmed_up(net, x)
        is_other = dist.get_rank() == 0
        if is_other and what == "frozen":
            net.module.third.requires_grad_(False)
        with contextlib.ExitStack() as stack:
            if is_other and what == "weighted":
                stack.enter_context(net.weighted(2))
            step()
        output = net(x)
        with pytest.raises(RuntimeError, match=said):
            output.sum().backward()
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_a_probe_of_one_rank_is_an_error_on_both_in_the_next_backward() -> None:
    """Of a module that is replicated in place."""
    with recording():
        torch.manual_seed(0)
        net = replicate(Net().to("cuda"), bucket_cap_mb=6e-4)
        x = torch.randn(5, 6).to("cuda")
        step = warmed_up(net, x)
        if dist.get_rank() == 0:
            net(x[:2]).max(1).values.sum().backward()
        else:
            step()
        output = net(x)
        with pytest.raises(RuntimeError, match=r"option 'backward\(\)': rank 0 has 'called in"):
            output.sum().backward()
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("freezes", "said"),
    [
        (False, "the ranks are at different places of their programs: rank 0: reduce_gradients"),
        (True, r"option 'reduction': rank 0 has 'on request"),
    ],
    ids=["same parameters", "one is frozen"],
)
@ranks(2, interprets=True)
def test_a_request_of_one_rank_and_a_backward_of_the_other(
    rank: int, freezes: bool, said: str
) -> None:
    """Both find it at the end of their next reduction, again a request and a backward."""
    with recording():
        torch.manual_seed(0)
        net = DistributedDataParallel(Net().to("cuda"))
        x = torch.randn(5, 6).to("cuda")
        step = warmed_up(net, x)

        def reduce_here_or_there() -> None:
            if rank:
                return step()
            with net.no_sync():
                step()
            net.reduce_gradients()

        if freezes and rank:
            net.module.third.requires_grad_(False)
        reduce_here_or_there()
        with pytest.raises(RuntimeError, match=rf"(?s)rank {rank}, step.*{said}"):
            reduce_here_or_there()
        torch.cuda.synchronize()
        net.module.third.requires_grad_(True)
        step()
        net.check_sync()
