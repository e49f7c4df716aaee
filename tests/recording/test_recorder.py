"""The recorded device: its context, the streams of nodes, and the precision of operands."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recording.device import recording
from recording.recorder import Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as found:
        yield found


def on_device(*shape: int) -> Any:
    return torch.ones(*shape, device="cuda")


def test_the_device_is_gone_after_the_context() -> None:
    current_stream, backward = torch.cuda.current_stream, torch.autograd._engine_run_backward
    with recording():
        x = on_device(2)
    assert x.is_cpu
    assert torch.cuda.current_stream is current_stream
    assert torch.autograd._engine_run_backward is backward


def test_a_node_runs_on_the_stream_of_its_forward(recorder: Recorder) -> None:
    x, side = on_device(4).requires_grad_(), torch.cuda.Stream()
    torch.cuda.synchronize()
    ran = {}

    def note(name: str) -> Any:
        return lambda *_: ran.update({name: recorder.current})

    with torch.cuda.stream(side):
        y = x * 2
        y.grad_fn.register_hook(note("forward on the side"))
    torch.cuda.current_stream().wait_stream(side)
    z = y.sum()
    x.register_post_accumulate_grad_hook(note("accumulation"))
    third = torch.cuda.Stream()
    third.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(third):
        z.backward()
        x.grad.clone()  # type: ignore[union-attr]
    assert ran == dict.fromkeys(ran, side.timeline)  # type: ignore[attr-defined]
    assert len(ran) == 2
    assert not recorder.races


def test_an_operand_without_dimensions_loses_precision_on_the_device_alone(
    recorder: Recorder,
) -> None:
    on_host = torch.tensor(1 / 3, dtype=torch.float64)
    factor, payload = on_host.to("cuda"), torch.ones(3, dtype=torch.bfloat16, device="cuda")
    payload.mul_(factor)
    torch._foreach_mul_([payload], factor)
    assert (payload.float() * factor)[0] != payload.float()[0] * on_host.float().double()
    assert len(recorder.rounded) == 3
    payload.mul_(on_host)
    payload.mul_(factor.item())
    payload.double() * factor
    payload.copy_(factor)
    torch.where(payload[0] != 0, payload, payload)
    assert len(recorder.rounded) == 3
