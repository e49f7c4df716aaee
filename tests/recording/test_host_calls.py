"""What the host calls in a steady step on a GPU. The limits may only be lowered."""

import pytest
from device_step import step_calls
from distributed import ranks


@pytest.mark.parametrize("moves", [False, True], ids=["steady", "moved"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@ranks(2, interprets=True)
def test_a_bucket_and_the_rest_of_a_step_call_few_functions(views: bool, moves: bool) -> None:
    """Of steps that differ in the number of buckets alone. ``moved``: gradients lie elsewhere.

    The rest has two waits, and two launches that unflatten: see ``test_way_back.py``.
    """
    few, many = (
        step_calls(16, buckets, moves, gradient_as_bucket_view=views) for buckets in (2, 4)
    )
    of_package = (many.of_package.total() - few.of_package.total()) / 2
    of_others = (many.of_others.total() - few.of_others.total()) / 2
    assert of_package <= (8 if moves else 6), many.of_package
    assert of_others <= (24 if moves else 14), many.of_others
    assert few.of_package.total() - 2 * of_package <= 37, few.of_package
