"""The command ``tritonddp``: which of its commands is meant, and what their exit codes say.

A command is a module of this room with ``add_arguments(parser)`` and ``main(arguments)``, which
returns the exit code. Only the module of the command that was asked for is imported. If it has
``parents()`` as well, those are parsers whose arguments it takes over.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "run": "run a script under torchrun, with tritonddp's class in the place of torch's",
    "compare": "time a script with torch's class and with tritonddp's, and compare their gradients",
    "doctor": "show what this machine has, how fast its ranks exchange, and what follows",
}
EXIT_CODES = """\
exit codes:
  0  fine (run: the script's own exit code)
  1  something was found: gradients or parameters differ, tritonddp is slower, a problem
  2  the command line cannot be carried out; the message says why
  3  the script failed, wrapped no model or made too few steps; the message says which
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line, that of this process if None; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        _overview().print_help(sys.stderr)
        return 2
    if words[0] not in COMMANDS:
        name = _overview().parse_args(words).command  # ends here: help, version, or an error
        raise AssertionError(f"no command {name}")
    module = importlib.import_module(f"tritonddp.cli.{words[0]}")
    parents = module.parents() if hasattr(module, "parents") else []
    parser = argparse.ArgumentParser(
        prog=f"tritonddp {words[0]}",
        description=module.__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=parents,
        add_help=not parents,
    )
    module.add_arguments(parser)
    return module.main(parser.parse_args(words[1:]))


def _overview() -> argparse.ArgumentParser:
    """The parser of what comes before a command."""
    from tritonddp import __version__

    commands = "\n".join(f"  {name:<9}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tritonddp",
        usage="tritonddp [-h] [--version] COMMAND ...",
        description=f"commands (tritonddp COMMAND --help tells more):\n{commands}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tritonddp {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS, metavar="COMMAND")
    return parser
