"""The only record of which parameters this rank uses.

It provides the flags that a bucket sends (``Bucket.sent_flags``). Their sum is the number of ranks
that use each parameter (``Bucket.rank_counts``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import count
from operator import or_

from torch import Tensor

from tritonddp._torch import hooks_after_accumulation


class ParameterUse:
    """The parameters of a bucket set that this rank uses. It lives as long as the bucket set.

    A parameter counts as used in a reduction if

    - it is *expected*: when the backward begins, the engine announces that it will reach it;
    - a *local* backward (``no_sync``, for example) has used it since the last reduction;
    - or its gradient becomes *ready* without an announcement. Such gradients come from inner
      backwards, which reentrant checkpoints run: the engine announces only the nodes of the outer
      backward.

    A parameter that is not expected is *missing*. When that happens for the first time, it is
    *suspected*: the end of that backward shows whether its gradient became ready nevertheless. Once
    an inner backward has been seen, any missing parameter may get a gradient.

    Parameters are identified by their indices in the bucket set.

    Attributes:
        flags: for each parameter, whether it counts as used in the current reduction.
        expected: for each parameter, whether it is expected in the current backward.
        ready: the parameters in the order in which their gradients became ready. A hook in C
            appends to this list.
        local: for each parameter, whether a local backward has used it since the last reduction.
        has_local: there was such a backward.
        missing: missing parameters of the current or last reduced backward; ``None`` before the
            first.
        is_static: all reduced backwards had the same missing parameters.
        inner: parameters that have had gradients from inner backwards.
        suspected: see above.
        awaited: parameters that may get an unannounced or a second gradient in the current
            backward: they are sent at its end.
        index_of: parameter index by the ``id`` of the parameter.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.flags = [False] * len(params)
        self.expected: Sequence[bool] = ()
        self.ready: list[Tensor] = []
        self.local = [False] * len(params)
        self.has_local = False
        self.missing: Collection[int] | None = None
        self.is_static = True
        self.inner: set[int] = set()
        self.suspected: set[int] = set()
        self.awaited: Collection[int] = ()
        self._settled: set[int] = set()  # missing parameters without a gradient at the end
        self._finds_unused: bool | None = None  # the option find_unused_parameters
        self._params = params
        self.index_of = dict(zip(map(id, params), count()))

    # A backward begins

    def begin(self, expected: Sequence[bool], finds_unused: bool | None) -> None:
        """Begin a reduced backward; ``finds_unused`` is ``find_unused_parameters``."""
        self.expected, self._finds_unused = expected, finds_unused
        self.flags = list(map(or_, expected, self.local)) if self.has_local else list(expected)
        all_come = all(expected)
        missing = frozenset(
            () if all_come else (n for n, comes in enumerate(expected) if not comes)
        )
        if missing != self.missing:
            self.is_static = self.is_static and self.missing is None
            self.missing = missing
        self.suspected = set(missing) - self._settled if missing else set()
        self.awaited = self.inner.union(missing) if self.inner else ()

    def wait_for(self, indices: Collection[int]) -> None:
        """Record that these parameters may get an unannounced gradient."""
        self.awaited = indices

    def wait_for_all(self) -> None:
        """Wait for all parameters, suspect none: the engine announced an inner backward only."""
        self.awaited, self.suspected = range(len(self.expected)), set()

    def begin_local(self, expected: Sequence[bool]) -> None:
        """Begin a backward that only accumulates."""
        self.expected, self.awaited = expected, ()

    def count(self, used: Sequence[bool]) -> None:
        """Count these parameters as used when a reduction begins without a backward."""
        self.flags = list(used)
        self.ready.clear()

    # Gradients become ready

    def note(self, indices: Iterable[int]) -> None:
        """Record that this rank has gradients for these parameters, too."""
        for index in indices:
            self.flags[index] = True

    def note_ready(self, indices: range) -> None:
        """Count each of these parameters as used if its gradient is ready."""
        if self.missing:
            ready = set(map(id, self.ready))
            self.note(index for index in indices if id(self._params[index]) in ready)

    def ready_indices(self) -> list[int]:
        """Return :attr:`ready` as indices."""
        found = map(self.index_of.get, map(id, self.ready))
        return [index for index in found if index is not None]

    def unannounced(self) -> list[tuple[int, int]]:
        """Return unannounced or repeated gradients: parameter, and position in ``ready``."""
        ready, expected = self.ready_indices(), self.expected
        if len({*ready}) == len(ready) and all(map(expected.__getitem__, ready)):
            return []
        found, seen = [], set()
        for place, index in enumerate(ready):
            if index in seen or not expected[index]:
                found.append((index, place))
            seen.add(index)
        return found

    def take_unannounced(self) -> list[tuple[int, int]]:
        """Return :meth:`unannounced`; these count as used, and are waited for from now on."""
        found = self.unannounced()
        self.inner.update(index for index, _ in found)
        self.note(index for index, _ in found)
        return found

    def has(self, param: Tensor) -> bool:
        """Return True if the bucket set has this parameter."""
        return id(param) in self.index_of

    def has_all(self) -> bool:
        """Return True if the gradients of all parameters that require one are ready."""
        ready = set(map(id, self.ready))
        return all(id(param) in ready for param in self._params if param.requires_grad)

    def count_missing(
        self, flags: Sequence[bool], params: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[bool]:
        """Return which of these parameters count as used, if some packed gradients are missing.

        A parameter without a gradient counts, with zeros, if a hook has dropped the gradient. With
        ``find_unused_parameters=False`` it also counts if a custom function returned no gradient.
        It does not count if it was frozen meanwhile, or if the gradient of a ``no_sync`` backward
        was dropped.
        """
        ready: Iterable[Tensor] = () if self._finds_unused else self.ready
        ready = [param for param in ready if param.grad is None and param.requires_grad]
        if self._finds_unused is None:
            ready = [param for param in ready if hooks_after_accumulation(param)]
        zeros = set(map(id, ready))
        return [
            flag and (grad is not None or id(param) in zeros)
            for flag, param, grad in zip(flags, params, grads, strict=True)
        ]

    # A backward is over

    def add_local(self, is_usual: bool) -> None:
        """End a local backward. If ``is_usual``, all expected gradients were ready."""
        used = self.expected
        if not is_usual:
            ready = {*self.ready_indices()}
            self.inner.update(index for index, _ in self.unannounced())
            used = [index in ready for index in range(len(used))]
        self.local = list(map(or_, self.local, used))
        self.has_local = True

    def settle(self, missing: Iterable[int] | None = None) -> None:
        """Stop suspecting these parameters, by default all suspected ones, after a reduction.

        Parameters in :attr:`inner` are still waited for.
        """
        self._settled.update(self.suspected if missing is None else missing)
        self.suspected = set()

    def clear_local(self) -> None:
        """Reset the record of local backwards, since all gradients are reduced."""
        self.local, self.has_local = [False] * len(self._params), False

    # Rebuilt buckets

    def inherit(self, former: ParameterUse) -> None:
        """Continue from ``former``, whose buckets were replaced.

        The gradient of a new parameter may come from a local backward, if there was one.
        """
        old = [*map(former.index_of.get, map(id, self._params))]
        self.has_local, self.is_static = former.has_local, former.is_static
        self.local = [
            self.has_local and param.grad is not None if index is None else former.local[index]
            for index, param in zip(old, self._params, strict=True)
        ]
        self.inner = {new for new, index in enumerate(old) if index in former.inner}
        self._settled = {new for new, index in enumerate(old) if index in former._settled}
        if former.missing is not None:
            self.missing = {new for new, index in enumerate(old) if index in former.missing}
