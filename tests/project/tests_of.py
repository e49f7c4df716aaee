"""Which tests reach a line of the package?

    python tests/project/tests_of.py tritonddp/reducer/autograd_driver.py:120
    make tests-of AT=tritonddp/reducer/autograd_driver.py:120         REFRESH=1 measures first

prints these tests, sorted. For a ``def`` or ``class``, it prints the tests that run any line of it.
"""

import argparse
import ast
from pathlib import Path

from measured import FOLDER, ROOT, measure, owner_of


def lines_of(path: Path, line: int) -> range:
    """The lines of the innermost statement at this line; for a ``def``, of its body."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            body, end = getattr(node, "body", []), node.end_lineno + 1
            first = body[0].lineno if body else end
            is_def = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if line < first:
                found = range(first, end) if is_def else range(node.lineno, first)
    return found


def reaching(path: Path, line: int) -> list[str]:
    """The names of the tests, sorted, except for code that runs during an import."""
    from coverage import CoverageData

    data = CoverageData(str(FOLDER / "data"))
    data.read()
    contexts = data.contexts_by_lineno(str(path))
    found = {owner_of(each) for at in lines_of(path, line) for each in contexts.get(at, [])}
    return sorted(found - {""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("at", nargs="?", default="", help="FILE:LINE")
    parser.add_argument("--refresh", action="store_true", help="measure first")
    arguments, rest = parser.parse_known_args()
    file, _, line = arguments.at.rpartition(":")
    if arguments.at and not ((ROOT / file).is_file() and line.isdecimal()):
        parser.error(f"{arguments.at} is not FILE:LINE, such as tritonddp/wrapper.py:120")
    if arguments.refresh:
        measure(rest)
    if arguments.at and not (FOLDER / "data").exists():
        parser.error("no data: make tests-of REFRESH=1 measures (half an hour or longer)")
    if arguments.at:
        found = reaching(ROOT / file, int(line))
        print("\n".join([*found, f"tests that reach {arguments.at}: {len(found)}"]))


if __name__ == "__main__":
    main()
