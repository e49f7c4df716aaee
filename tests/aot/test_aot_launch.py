"""A launch passes what Triton itself would pass to its driver, in less time of the host.

Nothing is launched: a function of the test replaces Triton's function in C. The arguments of that
function differ between Triton 3.6 and 3.9, so they are compared with those of Triton's own launch.
"""

from typing import Any

import pytest
from test_aot import run
from versions import needs_hook_chains

pytestmark = needs_hook_chains

# The difference: Triton makes a record for two chains of hooks, although they are empty.
SPARED = [["NoneType", "LazyDict"], ["NoneType", "HookChain"], ["NoneType", "HookChain"]]
EQUAL = [["LazyDict", "LazyDict"]]  # two objects with the same content


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    (facts,) = run("launch_kernels.py")
    return facts


def test_a_launch_that_is_prepared_again_compiles_nothing(facts):
    assert facts["compiled once"]


def test_the_driver_gets_what_triton_passes_except_empty_chains_of_hooks(facts):
    assert facts["unhooked"] == SPARED


def test_hooks_of_profilers_are_called_until_they_are_removed(facts):
    for name in ("enter", "exit"):
        assert facts[name] == [[name, "flatten_kernel"]]
        assert facts[f"{name}, arguments"] == EQUAL
        assert facts[f"{name}, removed"] == []
    assert facts["again"] == SPARED


def test_an_object_that_replaces_the_chain_of_hooks_is_passed_on(facts):
    assert facts["function"] == EQUAL
    assert facts["none"] == []


def test_a_prepared_launch_calls_only_the_launch_and_the_current_stream(facts):
    calls = facts["calls"]
    assert calls["prepared"] == calls["run"] + 2
    assert calls["by triton"] >= calls["prepared"] + 10
    # tables.update, and the functions of torch that return the current device.
    assert calls["flatten"] <= calls["prepared"] + 8
    assert calls["unflatten"] <= calls["prepared"] + 9
