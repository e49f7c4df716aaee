"""The map of used parameters, and strict mode, in which all parameters must be used."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import Two
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import drawn, train_step

from tritonddp import DistributedDataParallel


class Backwards(Two):
    """Its layers are registered in the reverse order of their use: buckets are rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self._modules.pop("first")


@ranks(1, 3)
def test_the_map_of_used_parameters_counts_ranks(rank: int) -> None:
    world_size = dist.get_world_size()
    for kind in (Two, Backwards):
        net = DistributedDataParallel(kind())
        assert net.reducer._get_local_used_map().tolist() == [0, 0, 0]
        for uses_second in ([True] * 3, [True, False, False], [False] * 3, [False, True, True]):
            net(drawn(4, 3), uses_second[rank]).sum().backward()
            used = net.reducer._get_local_used_map()
            assert used.dtype is torch.int32
            first, second = [world_size], [sum(uses_second[:world_size])] * 2
            assert used.tolist() == (first + second if kind is Two else second + first)


def many() -> nn.Module:
    model = Two()
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    model.extra = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
    return model


@pytest.mark.parametrize("level", ["OFF", "INFO"])
@ranks(2)
def test_the_error_of_strict_mode_has_stocks_phrases_and_numbers(rank: int, level: str) -> None:
    errors = []
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    for kind in (DistributedDataParallel, Stock):
        net: Any = kind(many(), find_unused_parameters=False)
        net(drawn(4, 3)).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            net(drawn(4, 3))
        errors.append(str(caught.value))
    dist.set_debug_level(before)
    numbers = " ".join(map(str, range(3, 15)))
    unused = [f"extra.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]
    phrases = [
        "Expected to have finished reduction in the prior iteration before starting a new one",
        "passing the keyword argument `find_unused_parameters=True`",
        "`forward` function outputs participate in calculating loss",
        f"Parameter indices which did not receive grad for rank {rank}: {numbers}",
    ]
    if level == "OFF":
        phrases.append("set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or")
        names = f"for rank {rank}: {', '.join(unused[:10])}, and 2 more"
    else:
        names = f"Parameters which did not receive grad for rank {rank}: {', '.join(unused)}"
    assert names in errors[0]
    assert all(phrase in error for phrase in phrases for error in errors), errors
    assert "Since `find_unused_parameters=True` is enabled" not in errors[0]


@ranks(2)
def test_an_unfinished_backward_is_an_error_of_check_reducer_finalized() -> None:
    net = DistributedDataParallel(Two())

    def check(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)Expected to have finished.*is still running"):
            net._check_reducer_finalized()
        raise KeyError("an error of the program")

    handle = net.module.first.weight.register_hook(check)
    with pytest.raises(KeyError):
        net(drawn(4, 3)).sum().backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="a backward failed"):
        net._check_reducer_finalized()
    train_step(net, drawn(4, 3), loss=torch.sum)
    net._check_reducer_finalized()
    strict = DistributedDataParallel(Two(), find_unused_parameters=False)
    strict(drawn(4, 3), both=False).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        strict._check_reducer_finalized()
