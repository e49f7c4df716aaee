"""An earlier revision becomes a package of its own, and nothing of it reaches into the tree."""

from __future__ import annotations

import pytest

from benchmarks.step import revision


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from tritonddp.bucket import Bucket", "from tritonddp_base.bucket import Bucket"),
        ("from tritonddp import bucket", "from tritonddp_base import bucket"),
        ("    from tritonddp.kernels import table", "    from tritonddp_base.kernels import table"),
        ("import tritonddp", "import tritonddp_base as tritonddp"),
        ("import tritonddp  # why", "import tritonddp_base as tritonddp  # why"),
        ("import tritonddp.bucket as b", "import tritonddp_base.bucket as b"),
        ("from tritonddp_other import x", "from tritonddp_other import x"),
        ("import tritonddp_other", "import tritonddp_other"),
        ('torch.library.Library("tritonddp", "D")', 'torch.library.Library("tritonddp_base", "D")'),
        ("torch.ops.tritonddp.f(x)", "torch.ops.tritonddp_base.f(x)"),
        ('"""tritonddp."""  # from tritonddp', '"""tritonddp."""  # from tritonddp'),
    ],
)
def test_absolute_imports_are_renamed(source: str, expected: str) -> None:
    if source.startswith(" "):
        source, expected = f"def f():\n{source}", f"def f():\n{expected}"
    assert revision.renamed(source, "here") == expected


@pytest.mark.parametrize("source", ["import os, tritonddp", "import tritonddp.bucket"])
def test_an_import_that_cannot_be_renamed_is_an_error_that_names_it(source: str) -> None:
    with pytest.raises(revision.RevisionError, match=r"^abc:x\.py, line 2: `import .*` cannot"):
        revision.renamed(f"x = 1\n{source}\n", "abc:x.py")
