"""Programs that know nothing of this package cannot tell it from stock DDP."""

from itertools import islice

import pytest

from hostile.beside import PROGRAMS, differences

# Played by `make test`: some of every root, each in half a second.
QUICK = {
    "backwards.fisher_information_uneven",
    "backwards.local_and_global_wrappers",
    "backwards.old_wrapper_on_one_rank",
    "backwards.saliency_on_one_rank",
    "buffers.codebook_through_data",
    "buffers.recalibrated_on_one_rank",
    "buffers.statistic_of_gradients",
    "collectives.a_branch_for_each_rank",
    "gradients.aligned_gradients",
    "gradients.freed_gradients",
    "gradients.marked_gradients",
    "gradients.own_end_of_backward",
    "names.forwarding_subclass",
    "names.scripted_module",
    "order.two_groups",
    "overrides.named_members",
    "strictness.adversarial_inputs",
    "strictness.shared_encoder",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.quick] if name in QUICK else [])
        for name in sorted(PROGRAMS)
    ],
)
def test_a_program_sees_what_it_sees_under_stock(name: str) -> None:
    found = list(islice(differences(name), 5))
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_the_quick_programs_are_there() -> None:
    assert set(PROGRAMS) >= QUICK
