"""Public calls with arbitrary arguments, which may raise only what their docstrings document."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from differential.calls.arguments import absurd, batch, flags, numbers, tensors
from differential.calls.contract import Users, call, only_documented
from tritonddp import DistributedDataParallel as DDP
from tritonddp import Int8

Strategy = st.SearchStrategy[Any]
Draw = Callable[[Strategy], Any]

# Valid values of the arguments of the constructor.
_VALID: dict[str, list[Any]] = {
    "gradient_as_bucket_view": [False, True],
    "bucket_cap_mb": [25, 1e-4, 1e-5],
    "bucket_cap_mb_list": [[1], [1e-6, 2], (3,), []],
    "lazy_bucket_allocation": [False, True],
    "find_unused_parameters": [None, True],
    "skip_all_reduce_unused_params": [False, True],
    "reduce_dtype": [torch.bfloat16, torch.float16],
    "compression": [
        "int8",
        *(Int8(exact=which) for which in ("body.weight", "*", ["head.*"])),
        Int8(error_feedback=False, exact=lambda name, _: "h" in name),
    ],
    "check_finite": [None, "raise", "warn"],
    "transport": ["auto", "process_group", "peer_memory"],
    "gradient_divide_factor": [1, 2.5],
    "metrics": [False, True],
    "scalars": ["loss", ("loss", "tokens"), []],
    "device_ids": [[], [0], [0, 1], ["cpu"]],
}
# Options of the wrapper whose methods are called.
_COMBINED = (
    *("gradient_as_bucket_view", "bucket_cap_mb", "lazy_bucket_allocation", "metrics"),
    *("find_unused_parameters", "skip_all_reduce_unused_params", "check_finite"),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from(_VALID[name]) for name in _COMBINED}
    | {"transport": st.sampled_from(["auto", "process_group"]), "scalars": st.just(("loss",))},
)


def constructor_options() -> st.SearchStrategy[dict[str, Any]]:
    """Up to three, mostly absurd."""
    values = {
        name: st.sampled_from(_VALID[name]) | absurd() if name in _VALID else absurd()
        for name in inspect.signature(DDP).parameters
        if name != "module"
    }
    chosen = st.lists(st.sampled_from([*values]), max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({n: values[n] for n in names}))


# Arguments of methods

_PARAMS = ["body.weight", "body.bias", "head.weight", "head.bias"]
_LISTS = st.lists(absurd() | tensors(), max_size=5)
_MAPPINGS = st.dictionaries(st.sampled_from([*_PARAMS, "x", 3]), absurd() | tensors(), max_size=3)
_NUMBERS = numbers() | tensors() | absurd()
_SCALARS = st.dictionaries(st.sampled_from(["loss", "loss", "loss", "other"]), _NUMBERS, max_size=1)


def _completed(value: Any) -> Any:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return lambda *_: future


def _raising(*_: Any) -> Any:
    raise Users


_HOOKS = st.one_of(
    absurd(),
    absurd().map(lambda value: lambda *_: value),
    absurd().map(_completed),
    st.sampled_from([default_hooks.allreduce_hook, _raising, len, lambda: None]),
)


def _states() -> Strategy:
    """The result of ``comm_state_dict()``, with some entries changed, or without one."""
    good: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "bucket_order": _PARAMS[::-1],
        "weight_unit": 16.0,
        "sent": {},
        "reduced": {},
    }
    entries = st.one_of(absurd(), st.lists(st.sampled_from([*_PARAMS, "zz", 3, None]), max_size=6))
    changed = st.dictionaries(st.sampled_from([*good]), entries, max_size=2)
    return st.one_of(
        changed.map(lambda entries: {**good, **entries}),
        st.sampled_from([*good]).map(lambda key: {k: v for k, v in good.items() if k != key}),
        absurd(),
    )


class Method(NamedTuple):
    """What is drawn for a method.

    Attributes:
        steps: how many steps run after the call, or in the context that it returns.
        also: another method whose exceptions these steps may raise.
    """

    args: Strategy
    named: Strategy = st.just({})
    steps: Strategy = st.just(0)
    also: str = ""


def _arguments(*args: Strategy, **more: Any) -> Method:
    return Method(st.tuples(*args), **more)


_ONE = st.just(1)
METHODS: dict[str, Method] = {
    "reduce_gradients": _arguments(
        st.none() | absurd() | _LISTS | _MAPPINGS, st.none() | absurd() | _LISTS
    ),
    "weighted": _arguments(_NUMBERS, st.sampled_from(["mean", "sum"]) | absurd(), steps=_ONE),
    "join": _arguments(flags(), flags(), flags(), steps=st.integers(0, 2), also="join_hook"),
    "add_scalars": _arguments(named=_SCALARS, steps=_ONE),
    "check_sync": _arguments(
        named=st.fixed_dictionaries({"buffers": flags(), "gradients": flags()})
    ),
    "register_comm_hook": _arguments(st.none() | absurd(), _HOOKS, steps=_ONE),
    "_register_builtin_comm_hook": _arguments(absurd()),
    "_register_fused_optim": _arguments(absurd()),
    "_register_buffer_comm_hook": _arguments(
        absurd(), absurd().filter(lambda each: not callable(each))
    ),
    "_set_ddp_runtime_logging_sample_rate": _arguments(absurd()),
    "_default_broadcast_coalesced": _arguments(absurd() | st.lists(absurd(), max_size=2)),
    "load_comm_state_dict": Method(st.lists(_states(), max_size=2)),
    "metrics": _arguments(),
    "reduced_scalars": _arguments(),
}


def _steps(ddp: DDP, count: int = 1) -> None:
    for _ in range(count):
        ddp(batch()).sum().backward()


def _call_method(name: str, ddp: DDP, draw: Draw) -> None:
    method = METHODS[name]
    args, named, steps = draw(method.args), draw(method.named), draw(method.steps)
    documented = [getattr(DDP, each) for each in (name, method.also) if each]
    with only_documented(*documented):
        call(getattr(ddp, name), args, named, lambda: _steps(ddp, steps))


# Other calls


def forward(ddp: DDP, draw: Draw) -> None:
    args = draw(st.lists(absurd(), max_size=2))
    named = draw(st.dictionaries(st.sampled_from(["a", "b"]), absurd(), max_size=2))
    with only_documented(DDP.forward):
        out = ddp(batch(), *args, **named)
        (out[0] if isinstance(out, tuple) else out).sum().backward()


def manual_finalization(ddp: DDP, draw: Draw) -> None:
    wanted = draw(st.one_of(st.booleans(), numbers(), st.sampled_from(["", "no", b""])))
    with only_documented(DDP.require_manual_backward_finalization):
        ddp.require_manual_backward_finalization = wanted
    with only_documented(DDP.finalize_backward, DDP.forward):
        _steps(ddp, draw(st.integers(0, 2)))
        ddp.finalize_backward()
    with only_documented(DDP.require_manual_backward_finalization):
        ddp.require_manual_backward_finalization = False


CALLS: dict[str, Callable[[DDP, Draw], None]] = {
    name: functools.partial(_call_method, name) for name in METHODS
} | {each.__name__: each for each in (forward, manual_finalization)}
