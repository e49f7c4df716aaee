"""Any call with any arguments, and sequences of them: what comes out is documented.

After each call the next correct step gives the gradients of an unwrapped module.
"""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

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


@pytest.mark.parametrize("call", CALLS)
@examples(8)
@given(data=st.data(), options=OPTIONS, steps=st.integers(0, 2))
def test_call(call: str, data: st.DataObject, options: dict[str, Any], steps: int) -> None:
    ddp = DistributedDataParallel(Net(), **options)
    for _ in range(steps):
        assert_right(ddp)
    CALLS[call](ddp, data.draw)
    if call not in _STAYS:
        assert_right(ddp)


class Sequence(RuleBasedStateMachine):
    """Calls in any order, right and wrong ones, with right steps between them."""

    @initialize(options=OPTIONS, hooked=st.booleans())
    def wrap(self, options: dict[str, Any], hooked: bool) -> None:
        self.ddp = DistributedDataParallel(Net(), **options)
        if hooked:
            self.ddp.register_comm_hook(None, default_hooks.allreduce_hook)

    @rule(data=st.data(), name=st.sampled_from([name for name in CALLS if name not in _STAYS]))
    def call(self, data: st.DataObject, name: str) -> None:
        CALLS[name](self.ddp, data.draw)

    @rule(how=st.sampled_from(["plain", "accumulated", "weighted", "requested"]))
    def right_step(self, how: str) -> None:
        assert_right(self.ddp, how)

    @rule(by=st.sampled_from([copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]))
    def go_on_with_a_copy(self, by: Any) -> None:
        self.ddp = by(self.ddp)

    def teardown(self) -> None:
        if hasattr(self, "ddp"):
            assert_right(self.ddp)


class TestSequence(Sequence.TestCase):
    settings = settings(examples(20), stateful_step_count=10)


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
