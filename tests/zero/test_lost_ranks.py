"""A rank whose backward breaks off. (What the others see of one that is lost: ``tests/faults``.)"""

import pytest
from beside_replicated import TRANSPORTS, Pair
from distributed import ranks
from modules import mlp
from training import breaking_off, drawn, squares


@pytest.mark.parametrize("transport", TRANSPORTS)
@ranks(2)
def test_a_backward_that_breaks_off_on_one_rank_is_recovered_from(
    rank: int, transport: str
) -> None:
    """The others get NaN, as documented; after that both train as before."""
    pair = Pair(mlp(4, 8, 8, 2), wrapper=TRANSPORTS[transport])
    for number in range(6):
        x = drawn(5, 4, step=number)
        if number != 3:
            pair.step(x)
            continue
        for net, optimizer in pair.each():
            with breaking_off(net.module[2].weight, rank == 1):
                squares(net(x)).backward()
            optimizer.zero_grad()
    pair.check()
