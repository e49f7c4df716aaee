"""Any call with any arguments raises only documented errors, and the next step is correct."""

import copy
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from differential.calls.arguments import Net, absurd, batch, modules
from differential.calls.contract import only_documented
from differential.calls.methods import CALLS, OPTIONS, constructor_options
from tritonddp import DistributedDataParallel

# With TRITONDDP_FUZZ=2000 each test draws 2000 examples, different ones in each run.
MANY = os.environ.get("TRITONDDP_FUZZ")
EXAMPLES = settings(
    max_examples=int(MANY or 40),
    derandomize=MANY is None,
    database=None,
    deadline=None,
    # To explain a failure hypothesis traces each line of torch, for minutes.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=MANY is not None,
)
# Calls that change the wrapper: a registered hook stays.
STAYS = {"register_comm_hook", "_register_fused_optim", "_register_builtin_comm_hook"}

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one rank in the test process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(before)


def assert_right(ddp: Any) -> None:
    """The next correct step gives the gradients of an unwrapped module in fp64."""
    if ddp.require_manual_backward_finalization:
        with only_documented(type(ddp).finalize_backward):
            ddp.finalize_backward()
        ddp.require_manual_backward_finalization = False
    alone = copy.deepcopy(ddp.module)
    for net in (ddp, alone):
        net.zero_grad(set_to_none=True)
        net(batch()).square().sum().backward()
    for (name, param), own in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, own.grad, msg=lambda text, n=name: f"{n}: {text}")


@EXAMPLES
@given(module=st.one_of(modules(), modules(), absurd()), options=constructor_options())
def test_the_constructor_raises_what_it_documents(module: Any, options: dict[str, Any]) -> None:
    ddp = None
    with only_documented(DistributedDataParallel):
        ddp = DistributedDataParallel(module, **options)
    if ddp is not None and type(module) is Net and "reduce_dtype" not in options:
        param = module.body.weight
        if param.dtype == torch.float64 and options.get("mixed_precision") is None:
            assert_right(ddp)


@EXAMPLES
@given(data=st.data(), call=st.sampled_from([*CALLS]), options=OPTIONS, steps=st.integers(0, 2))
def test_a_call_raises_what_it_documents(
    data: st.DataObject, call: str, options: dict[str, Any], steps: int
) -> None:
    ddp = DistributedDataParallel(Net(), **options)
    for _ in range(steps):
        assert_right(ddp)
    CALLS[call](ddp, data.draw)
    if call not in STAYS:
        assert_right(ddp)
