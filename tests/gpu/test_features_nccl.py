"""Other features over NCCL: the programs of the recorded device, hooks, streams and metrics."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather
from nets import WIDTH, batch, dense, gradients
from recording.programs import PROGRAMS, WARM_UP, Run
from test_metrics import PARTS, net, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Stock
from training import means, train_step
from worlds import CARDS, device_of_stock, everywhere, in_worlds, is_recorded

from tritonddp import DistributedDataParallel
from tritonddp.features.metrics import EVERY


@pytest.mark.parametrize("name", list(PROGRAMS))
@in_worlds(*CARDS)
def test_a_program_has_the_same_gradients_and_buffers_as_on_the_cpu(
    device: torch.device, name: str
) -> None:
    """Training and wrapping use different streams."""
    program, found = PROGRAMS[name], []
    for place, group in (("cpu", dist.new_group(backend="gloo")), ("cuda", None)):
        run = Run(program, place=place, group=group)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run.step(WARM_UP + 2)
            buffers = [buffer.cpu() for buffer in run.module.buffers()]
            found.append([*run.gradients(), *buffers])
        torch.cuda.synchronize(device)
    is_exact = not {"reduce_dtype", "compression", "mixed_precision"} & set(program.options)
    tolerance = 1e-5 if is_exact else 2e-2
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@in_worlds(*CARDS)
def test_outputs_are_on_the_given_device(device: torch.device) -> None:
    for options in (
        {"device_ids": [device.index]},
        {"device_ids": [device], "output_device": device.index},
    ):
        ddp = DistributedDataParallel(dense().to(device), **options)
        assert ddp(batch(0).to(device)).device == device


@everywhere
def test_a_communication_hook_trains_as_under_stock_ddp(device: torch.device, view: bool) -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    trained = []
    for wrapper, place in ((Stock, device_of_stock(device)), (DistributedDataParallel, device)):
        module = copy.deepcopy(nn.Sequential(*layers)).to(place)
        ddp = wrapper(module, gradient_as_bucket_view=view, bucket_cap_mb=0.002)
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            ddp(batch(step).to(place)).square().mean().backward()
            optimizer.step()
        trained.append([param.detach().cpu() for param in ddp.parameters()])
    stock, ours = trained
    assert_same_on_all_ranks(ours)
    torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-5)


@everywhere
def test_gradients_that_are_accumulated_on_several_streams(
    device: torch.device, view: bool
) -> None:
    """An AccumulateGrad node keeps the stream on which it was created.

    Each bucket has gradients of other streams, whose work takes longer than that of the caller.
    """
    alone = dense()
    module = copy.deepcopy(alone).to(device)
    streams, held = [], []
    for layer in module[::2] if device.type == "cuda" else ():
        streams.append(torch.cuda.Stream(device))
        with torch.cuda.stream(streams[-1]):
            held.append(layer.weight.expand_as(layer.weight))
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=0.03)
    for step in range(4):
        # In place, so that each gradient is added to on the stream of its node.
        ddp.zero_grad(set_to_none=False)
        loss = ddp(batch(step).to(device)).square().mean()
        for stream in streams if step else ():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(30_000_000)
        loss.backward()
        train_step(alone, batch(step), loss=lambda outputs: outputs.square().mean())
        torch.testing.assert_close(gradients(ddp), means(gradients(alone)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", PARTS)
@in_worlds(*CARDS)
def test_metrics_name_the_slow_rank_and_its_longest_part(device: torch.device, part: str) -> None:
    """On a CPU: ``tests/features/test_metrics.py``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(net().to(device), metrics=True)
    late = 0.06 * (rank == size - 1)
    train(ddp, EVERY, lambda _: time.sleep(0.02))
    found = train(ddp, 2 * EVERY + 1, lambda now: time.sleep(0.02 + late * (now == part)))[-1]
    parts = sum(found[f"{each}_ms"] for each in ("input", "forward", "backward", "exposed"))
    # Each of the five numbers is rounded to a microsecond on each rank, and again over the ranks.
    assert found["step_ms"] == pytest.approx(parts, abs=5 * 0.001)
    assert gather(found) == [found] * size
    # If two ranks share a GPU, kernels of NCCL that wait for the slow rank slow the other one down.
    if is_recorded(device) or torch.cuda.device_count() < size:
        return
    assert found["step_ms"] > 80  # steps of equal parts: 60
    assert found["slowest_rank"] == size - 1, found
    assert found[f"{part}_ms_max"] > 80
