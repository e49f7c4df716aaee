"""Launch a kernel by a driver that does nothing, and print what Triton has been asked to do.

A script, for the reason that compile_kernels.py gives. Prints one JSON list.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from triton import knobs

sys.path.insert(0, str(Path(__file__).parents[2]))

from faked_driver import faked_driver
from launch_cost import by_triton, compiled, counted, steady

ENTER, EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def main() -> None:
    asked: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> None:
        """As Triton's in C, which calls the hooks with what is before them."""
        asked.append(arguments)
        place = next((at for at, each in enumerate(arguments) if each is hooks[0]), None)
        if place is not None:
            metadata, enter, leave = arguments[place - 1 : place + 2]
            for hook in (enter, leave):
                if hook is not None:
                    hook(metadata)

    hooks = [ENTER, EXIT]
    facts: dict[str, Any] = {}
    with faked_driver(launch=launch):
        flat, functions = steady()
        (prepared, *_) = flat.tables.launches.values()

        def compare() -> list[list[str]]:
            """What is handed to C in our way and in Triton's, where that is not the same object."""
            asked.clear()
            prepared()
            by_triton(flat)()
            ours, theirs = ([*_flat(arguments)] for arguments in asked)
            assert len(ours) == len(theirs)
            pairs = zip(ours, theirs, strict=True)
            return [[_kind(a), _kind(b)] for a, b in pairs if a is not b and a != b]

        facts["unhooked"] = compare()
        seen: list[Any] = []
        for name, chain in (("enter", ENTER), ("exit", EXIT)):
            note = lambda metadata, name=name: seen.append([name, metadata.get()["name"]])  # noqa: E731
            chain.add(note)
            seen.clear()
            prepared()
            facts[name] = list(seen)
            facts[f"{name}, arguments"] = compare()
            chain.remove(note)
            seen.clear()
            prepared()
            facts[f"{name}, removed"] = list(seen)
        facts["again"] = compare()
        for name, other in (("function", lambda _: None), ("none", None)):
            knobs.runtime.launch_enter_hook = hooks[0] = other
            facts[name] = compare()
            knobs.runtime.launch_enter_hook = hooks[0] = ENTER
        kernel = compiled(flat)
        raw = partial(kernel.run, 1, 1, 1, 0, kernel.function, b"", None, None, None)
        facts["compiled once"] = kernel is compiled(flat)
        facts["calls"] = {
            "run": counted(raw),
            "prepared": counted(prepared),
            "by triton": counted(by_triton(flat)),
            **{name: counted(function) for name, function in functions.items()},
        }
    json.dump([facts], sys.stdout)


def _flat(arguments: tuple[Any, ...]) -> Any:
    for each in arguments:
        if isinstance(each, tuple | list):
            yield from _flat(tuple(each))
        else:
            yield each


def _kind(value: Any) -> str:
    return type(value).__name__


if __name__ == "__main__":
    main()
