"""A launch passes to the driver what Triton itself would pass, without its work on the host.

Nothing is launched: a function of the test replaces Triton's function in C. The arguments of that
function differ between Triton 3.6 and 3.9, so they are compared with those of Triton's own launch.
"""

from typing import Any

import pytest
from test_aot import run
from versions import needs_hook_chains

pytestmark = needs_hook_chains


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    (facts,) = run("launch_kernels.py")
    return facts


def test_the_driver_gets_the_arguments_of_triton_except_empty_chains_of_hooks(facts):
    # Triton creates a record for two chains of hooks, although they are empty.
    spared = [["NoneType", "LazyDict"], ["NoneType", "HookChain"], ["NoneType", "HookChain"]]
    assert facts["unhooked"] == spared
    # A function that replaces a chain is passed on; the two records have the same content.
    assert facts["function"] == [["LazyDict", "LazyDict"]]


def test_hooks_of_profilers_are_called_until_they_are_removed(facts):
    assert facts["enter"] == facts["exit"] == ["flatten_kernel"]
