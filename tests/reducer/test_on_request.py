"""``reduce_gradients``: errors and logs.

``differential/named/requests.py`` compares the means.
"""

import logging
from typing import Any

import pytest
import torch
from distributed import ranks, recorded_collectives
from logged import logged
from modules import OnDemand
from torch import nn
from training import assert_close, drawn, filled, gradients, means

from tritonddp import DistributedDataParallel


def wrapped() -> tuple[DistributedDataParallel, torch.Tensor]:
    torch.manual_seed(0)
    return DistributedDataParallel(OnDemand(width=30).double()), drawn(4, 3, dtype=torch.float64)


@ranks(2)
def test_invalid_requests_are_refused_before_a_collective() -> None:
    ddp, x = wrapped()
    params, wrong = list(ddp.parameters()), torch.ones(7)
    cases: list[tuple[Any, str, Any, Any]] = [
        (ValueError, "got 7 gradients, but the module has 8 trainable", [None] * 7, None),
        (ValueError, r"'first.weight' should match .* \(30, 3\)", {"first.weight": wrong}, None),
        (TypeError, r"'first.weight' should be a tensor, got 3", [3] + [None] * 7, None),
        (TypeError, "", "text", None),
        ((TypeError, ValueError), "", [params[0]], [None]),
        (ValueError, r"no\.such", {"no.such": wrong}, None),
        (ValueError, "pass the gradients too", None, params),
    ]
    with recorded_collectives() as calls:
        for error, text, grads, of in cases:
            with pytest.raises(error, match=text):
                ddp.reduce_gradients(grads, of)
        with ddp.weighted(1), ddp.no_sync():
            ddp(x).sum().backward()
        with ddp.weighted(2), pytest.raises(RuntimeError, match="weights of their backwards"):
            ddp.reduce_gradients()
    assert not calls.names
    ddp, x = wrapped()
    out = ddp(x)
    out.register_hook(lambda _: ddp.reduce_gradients())
    with pytest.raises(RuntimeError, match="during a backward"):
        out.sum().backward()


@ranks(2)
def test_different_requests_are_an_error_on_every_rank(rank: int) -> None:
    ddp, _ = wrapped()
    params = [ddp.module.unused.bias if rank else ddp.module.last.bias]
    with pytest.raises(RuntimeError, match=r"(?s)'last.bias'.*'unused.bias'"):
        ddp.reduce_gradients([torch.ones(2, dtype=torch.float64)], params)
    (found,) = ddp.reduce_gradients([torch.ones(2, dtype=torch.float64)], [ddp.module.last.bias])
    assert found.tolist() == [1, 1]


@ranks(2)
def test_a_sparse_gradient_on_one_rank_leaves_no_rank_waiting(rank: int) -> None:
    ddp, x = wrapped()
    with ddp.no_sync():
        ddp(x).sum().backward()
    bias = ddp.module.last.bias
    if rank:
        bias.grad = torch.ones_like(bias).to_sparse()
        with pytest.raises(RuntimeError, match=r"last\.bias"):
            ddp.reduce_gradients()
    else:
        ddp.reduce_gradients()
        assert bias.grad.isnan().all()


@ranks(2)
def test_requests_are_not_compressed_and_the_log_mentions_it_once() -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    with logged(logging.WARNING) as kept:
        for _ in range(2):
            for param in ddp.parameters():
                param.grad = 0.1 * filled(*param.shape)
            expected = means(gradients(ddp))
            ddp.reduce_gradients()
            assert_close(gradients(ddp), expected)
    (line,) = kept.lines()
    assert "reduce_gradients() sends gradients in full precision: compression applies" in line
