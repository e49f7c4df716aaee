"""Each short program sees the same with tritonddp and with stock DDP."""

import re
from pathlib import Path

import pytest
from launched import ROOT, run

from differential.short.configurations import Configuration
from differential.short.words import RULES, sample, steps

COMMAND = Path(__file__).parents[1] / "run.py"
CONFIGURATIONS = (
    *("plain", "plain+warm", "bare", "bare+warm", "bare+group", "bare+views", "views+warm"),
    *("unused", "unused+bare+views", "small", "small+bare+warm+group", "static", "nobuf"),
    *("allreduce", "hidden", "hidden+views+warm", "expert", "cache"),
    *("bare+replicate", "hidden+replicate", "expert+replicate", "views+bare+replicate+warm"),
)
# With two ranks and with three, each first in turn.
CASES = [
    (name, world_size)
    for place, name in enumerate(CONFIGURATIONS)
    for world_size in ((3, 2) if place % 2 else (2, 3))
]
QUICK = ("plain", "bare+warm", "hidden", "expert", "cache", "bare+replicate")


def play(*arguments: object, expected: int = 0) -> None:
    path = {"PYTHONPATH": str(ROOT)}
    command = (COMMAND, "--kind", "short", *map(str, arguments))
    done = run(*command, nproc=None, env=path, timeout=3600)
    if done.returncode != expected or "Traceback" in done.stderr:
        pytest.fail(f"{done.stdout[-10_000:]}\n{done.stderr[-5_000:]}", pytrace=False)


@pytest.mark.quick
def test_a_few_programs_of_two_events() -> None:
    play("--config", ",".join(QUICK), "--length", 2, "--sample", 15)


@pytest.mark.long
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_some_programs_of_three_to_five_events(name: str, world_size: int) -> None:
    arguments = ("--length", 5, "--sample", 300, "--seed", world_size)
    play("--config", name, "--world", world_size, *arguments)


@pytest.mark.long
def test_a_wrapper_with_a_fault_is_found() -> None:
    fault = ("--wrapper", "MadeInTheFirstForward")
    play("--config", "bare", "--only", "IFBS", *fault, expected=1)


@pytest.mark.thorough
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_all_programs_of_up_to_three_events(name: str, world_size: int) -> None:
    play("--config", name, "--world", world_size, "--length", 3)


def test_the_rules_quote_the_page_of_differences() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "differences.md").read_text())
    assert not [row for row in RULES if row not in page]


@pytest.mark.parametrize("row", RULES)
def test_a_rule_allows_a_difference_in_few_programs(row: str) -> None:
    shares = []
    for configuration in map(Configuration, ("plain", "static", "bare", "unused")):
        words = sample(3, configuration, 500, seed=0)
        found = [any(RULES[row](step, configuration) for step in steps(word)) for word in words]
        shares.append(sum(found) / len(found))
    assert 0 < max(shares) < 0.25
