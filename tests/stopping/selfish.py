"""The trials with a planted mistake: each rank stops by its own request, not by the headers."""

import sys

import trials

from tritonddp.coordination.agreement import Agreement


def should_stop(self: Agreement, reductions: int) -> bool:
    return self._asked_at >= 0


Agreement.should_stop = should_stop  # type: ignore[method-assign]
trials.__file__ = __file__  # what its processes run
trials._TIMEOUT = 5.0
sys.exit(trials.main())
