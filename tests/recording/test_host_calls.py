"""What the host calls in a steady step on a GPU. The limits may only be lowered."""

from unittest import mock

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


@ranks(2, interprets=True)
def test_a_bucket_of_large_gradients_and_each_of_them_call_few_functions() -> None:
    """As many as a bucket of small ones, some for its large ones, and few for each of these."""
    with mock.patch("tritonddp.buckets.placement.in_place.LARGE", 1):
        options = {"own": True, "reduce_in_place": True}
        few, many = (step_calls(16, buckets, **options) for buckets in (2, 4))
        more = step_calls(32, 2, **options)
    for name, most, most_of_gradient in (("of_package", 9, 2), ("of_others", 17, 6)):
        calls, with_more = getattr(few, name), getattr(more, name)
        bucket = (getattr(many, name).total() - calls.total()) / 2
        assert bucket <= most, getattr(many, name)
        assert (with_more.total() - calls.total()) / 16 <= most_of_gradient, with_more
