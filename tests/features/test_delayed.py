"""``delay_all_reduce_named_params``: some gradients are sent last."""

import copy

import pytest
from distributed import ranks
from modules import Layers
from training import delayed, wrap


@ranks(2)
def test_ranks_that_delay_other_parameters_are_told(rank: int) -> None:
    module = Layers("abc")
    options = delayed(module, f"layers.{'bc'[rank]}.bias", until=module.layers["a"].weight)
    with pytest.raises(RuntimeError, match="delayed"):
        wrap(module, **options)


@ranks(1)
def test_copies_are_told_from_the_parameters_themselves() -> None:
    module = Layers("abc")
    options = delayed(copy.deepcopy(module), "layers.c.bias", until=module.layers["a"].weight)
    with pytest.raises(ValueError, match=r"none of the wrapped module's: 'layers\.c\.bias'"):
        wrap(module, **options)
