"""A launch takes what Triton's own way of launching would hand on, and less of the host's time.

No GPU launches: Triton's Python runs down to its function in C, which a function of the test
replaces. That function's arguments are alike in no two of Triton 3.6 to 3.9, hence the comparison.
"""

from typing import Any

import pytest
from test_aot import run
from versions import needs_hook_chains

pytestmark = needs_hook_chains

# What differs between our way and Triton's: it makes a record, for two chains of hooks that are
# empty.
SPARED = [["NoneType", "LazyDict"], ["NoneType", "HookChain"], ["NoneType", "HookChain"]]
ALIKE = [["LazyDict", "LazyDict"]]  # an object of the same content each


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    (facts,) = run("launch_kernels.py")
    return facts


def test_a_launch_that_is_prepared_again_compiles_nothing(facts):
    assert facts["compiled once"]


def test_the_driver_gets_what_triton_would_give_it_but_for_hooks_that_there_are_not(facts):
    assert facts["unhooked"] == SPARED


def test_hooks_of_profilers_are_called_from_when_they_are_added_until_they_are_removed(facts):
    for name in ("enter", "exit"):
        assert facts[name] == [[name, "flatten_kernel"]]
        assert facts[f"{name}, arguments"] == ALIKE
        assert facts[f"{name}, removed"] == []
    assert facts["again"] == SPARED


def test_what_is_in_the_place_of_the_chain_of_hooks_is_handed_on(facts):
    assert facts["function"] == ALIKE
    assert facts["none"] == []


def test_a_prepared_launch_adds_to_what_launches_one_function_and_a_look_at_the_stream(facts):
    calls = facts["calls"]
    assert calls["prepared"] == calls["run"] + 2
    assert calls["by triton"] >= calls["prepared"] + 10
    # tables.update, and which device is current, with what torch calls for that.
    assert calls["flatten"] <= calls["prepared"] + 8
    assert calls["unflatten"] <= calls["prepared"] + 9
