"""Two ranks on hosts of their own, behind slow lines: what arrives, arrives late."""

import json

import power_sgd
import pytest
from distributed import run_ranks
from hosts import hosts_or_skip, outputs


@pytest.mark.long
def test_power_sgd_over_two_hosts_trains_as_over_local_ranks() -> None:
    """Stock's collectives of several buckets mix here, or wait for each other: it never ends."""
    with hosts_or_skip(2, rate=50e6) as hosts:
        remote = [json.loads(text) for text in outputs(hosts, power_sgd.__file__)]
    local = run_ranks(power_sgd.trained, 2)
    (_, here), (_, there) = remote
    assert here == there
    for (losses, _), (expected, _) in zip(remote, local, strict=True):
        assert losses == pytest.approx(expected, rel=1e-3)
        assert losses[-1] < 0.8 * losses[0]
