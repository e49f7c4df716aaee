"""Any call with any arguments: what comes out is documented.

After each call the next correct step gives the gradients of an unwrapped module.
"""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fuzz import contract
from fuzz.arguments import absurd
from fuzz.calls import CALLS, OPTIONS, constructor_options
from fuzz.contract import Undocumented, only_documented
from fuzz.examples import examples
from fuzz.models import Net, assert_right, modules
from tritonddp import DistributedDataParallel

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.filterwarnings("ignore")]

# After which a wrapper is not as it was: a hook that was registered stays.
_STAYS = {"register_comm_hook", "fused_optimizer", "builtin_comm_hook"}


@examples(40)
@given(module=st.one_of(modules(), modules(), absurd()), options=constructor_options())
def test_constructor(module: Any, options: dict[str, Any]) -> None:
    ddp = None
    with only_documented(DistributedDataParallel):
        ddp = DistributedDataParallel(module, **options)
    if ddp is not None and type(module) is Net and "reduce_dtype" not in options:
        param = module.body.weight
        if param.dtype == torch.float64 and options.get("mixed_precision") is None:
            assert_right(ddp)


@examples(40)
@given(data=st.data(), call=st.sampled_from([*CALLS]), options=OPTIONS, steps=st.integers(0, 2))
def test_call(data: st.DataObject, call: str, options: dict[str, Any], steps: int) -> None:
    ddp = DistributedDataParallel(Net(), **options)
    for _ in range(steps):
        assert_right(ddp)
    CALLS[call](ddp, data.draw)
    if call not in _STAYS:
        assert_right(ddp)


def test_docstrings_announce_what_is_read_from_them() -> None:
    assert contract.raises(DistributedDataParallel) == (
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    )
    assert contract.raises(DistributedDataParallel.no_sync) == ()


def test_an_accident_and_what_is_not_announced_are_found() -> None:
    def announces() -> None:
        """Do.

        Raises:
            TypeError: always.
        """

    unannounced = pytest.raises(Undocumented, match="announces TypeError, but raised KeyError")
    with unannounced, only_documented(announces):
        {}["a"]
    with pytest.raises(Undocumented, match="by accident"), only_documented(announces):
        len(3)  # type: ignore[arg-type]
    with only_documented(DistributedDataParallel), warnings.catch_warnings():
        DistributedDataParallel(nn.Linear)  # type: ignore[arg-type]
