"""Code that every Python process under ``tritonddp run`` and ``compare`` runs, from PYTHONPATH.

Python imports a module of this name when it starts. This module waits until torch is imported, and
then calls ``tritonddp.cli.injection``. A process that never imports torch only pays for the import
of this file. If this module hides another one of the same name, that one runs as usual.

Import only the standard library here, because the process may be unrelated to tritonddp.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

# Other modules are imported where needed, because this runs in each process.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

VARIABLE = "TRITONDDP_SESSION"


class _Finder:
    """Finds torch and tritonddp like the other finders, and acts once when they are imported.

    Importing tritonddp also imports torch. Only at the end of the outermost of these imports is
    everything available.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._found: set[str] = set()
        self._depth = 0  # number of nested imports
        self._has_acted = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_ours = name == "torch" or name.startswith("tritonddp.")
        if self._has_acted or not is_ours or name in self._found:
            return None
        import importlib.util

        self._found.add(name)  # avoids recursion: find_spec() asks this finder too
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            self._found.discard(name)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # restore the method of the class
                self._depth += 1
                try:
                    execute(module)
                finally:
                    self._depth -= 1
                self.imported()

            loader.exec_module = execute_and_act
        return spec

    def imported(self) -> None:
        """Act if torch is imported, and no import of torch or tritonddp is running."""
        if self._depth or self._has_acted or "torch" not in sys.modules:
            return
        import json

        self._has_acted = True
        session = json.loads(self._session)
        prefix, package = session["prefix"], session["package"]
        if os.path.realpath(sys.prefix) != os.path.realpath(prefix):
            sys.stderr.write(
                f"tritonddp: {sys.executable} does not belong to the environment {prefix} in "
                "which tritonddp was started; this process keeps torch's DistributedDataParallel\n"
            )
            return
        try:
            _import_package(package)
            from tritonddp.cli.injection import act

            act(session)
        except Exception as error:
            raise RuntimeError(
                "tritonddp could not replace torch's DistributedDataParallel in process "
                f"{os.getpid()}: {type(error).__name__}: {error}"
            ) from error


def _import_package(folder: str) -> None:
    """Import tritonddp, which may not be on this path: the launcher may have run in a clone.

    If a folder of that name is next to the script, for example a clone, its spec has no origin.
    """
    import importlib.util

    spec: Any = importlib.util.find_spec("tritonddp")
    if spec is not None and spec.origin is not None:
        importlib.import_module("tritonddp")
        return
    start = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        "tritonddp", start, submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["tritonddp"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["tritonddp"]
        raise


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    # Child processes find this folder in the variable; this process must not see it elsewhere.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    session = os.environ.get(VARIABLE)
    if session:
        finder: Any = _Finder(session)
        sys.meta_path.insert(0, finder)
    hidden: Any = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)
    if session:
        try:
            finder.imported()  # if a .pth file has already imported torch
        except RuntimeError as error:  # site would print it and continue
            raise SystemExit(str(error)) from error


_begin()
