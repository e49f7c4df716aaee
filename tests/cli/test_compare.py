"""``tritonddp compare``: real scripts, its verdicts, and what counts as a step."""

import itertools
import json
import os
import re
import signal
import time
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import launched
import pytest
import torch

from tritonddp.cli.compare import _stopped
from tritonddp.cli.comparison import contender, recorder
from tritonddp.cli.comparison.contender import ENDED, FAILED, SILENT, Outcome, Played, RankEnded
from tritonddp.cli.comparison.page import page
from tritonddp.cli.comparison.report import Comparison, as_json, last_words, text
from tritonddp.cli.comparison.turns import EndedEarly, Launches, Pair, Plan, _NotInTurns
from tritonddp.cli.comparison.verdict import Launch
from tritonddp.cli.main import main
from tritonddp.cli.terminal import Progress

PLANTED = launched.ROOT / "tests" / "cli" / "planted.py"

# Real scripts


def compare(*words: str | Path) -> tuple[int, Any, str]:
    """Run one launch; return the exit code, the JSON object and the lines on stderr."""
    arguments = ("-m", "tritonddp", "compare", "--json", "--seconds", "0", *words)
    done = launched.run(*arguments, nproc=None, env={"PYTHONPATH": str(launched.ROOT)})
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_a_wrong_gradient_is_found_and_figures_are_there(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    code, found, lines = compare("--html", html, PLANTED, "1000000")
    assert code == 1
    first, *_ = found["correctness"]
    assert first["title"] == "gradients of backward 1"
    assert first["names"] == ["0.bias"]
    assert first["largest"] == pytest.approx(0.001, rel=0.01)
    assert first["shared"] == [True, True]
    for played in found["launches"][0]:
        assert len(played["blocks"]) == found["plan"]["pairs"]
        assert played["peak_bytes"] > 2**26
        assert sum(played["shares"].values()) == pytest.approx(1)
    # Four parts make up the step, and the ratio is the quotient of the columns.
    step, *parts = found["rows"][:5]
    for column in ("first", "second"):
        assert sum(part[column] for part in parts) == pytest.approx(step[column])
    assert found["verdict"]["value"] == pytest.approx(step["second"] / step["first"])
    assert "0.bias" in html.read_text()
    assert not re.search(r"(src|href)=|url\(|@import", html.read_text())  # it needs no network
    seconds = [int(each) for each in re.findall(r"^\[ *(\d+) s\]", lines, re.MULTILINE)]
    assert seconds[0] == 0
    assert max(b - a for a, b in itertools.pairwise(seconds)) < 15


@pytest.mark.long
def test_a_script_that_fails_shows_its_last_lines() -> None:
    code, found, lines = compare("--one-at-a-time", "--against", "stock", PLANTED, "no number")
    assert code == 3
    assert "stock failed after 0 steps" in found["error"]
    assert "invalid literal for int() with base 10: 'no number'" in lines


def test_an_interrupt_shows_the_launches_until_then(monkeypatch, capsys):
    def play(launches: Launches) -> None:
        if len(launches.pairs) == count:
            raise KeyboardInterrupt
        launches.started = time.monotonic()
        time.sleep(0.01)
        launches.plan = Plan.of(1.0)
        launches.pairs.append(Pair(Played(), Played(), Launch(1.0, 0.9, 0.001)))

    monkeypatch.setattr(Launches, "play", play)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # later tests keep their handlers
    count = 1
    assert main(["compare", str(PLANTED)]) == 130
    printed = capsys.readouterr()
    preliminary = r"Preliminary table after one launch:.* 0\.900 \(.*stock  tritonddp"
    last = r".* 0\.900 \(.*\nInterrupted\. Completed launches: 1\.\n"
    assert re.search(preliminary + last, printed.out, re.DOTALL)
    assert re.search(r"; at most \d+ more, of \d+ s each$", printed.err, re.MULTILINE)
    count = 0
    assert main(["compare", "--json", str(PLANTED)]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted"}


# The launcher


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches([], "2", ("stock", "tritonddp"), tmp_path, Progress())


def outcome(words: str, longest: float = 0.1) -> Outcome:
    how, steps = words.split()
    last = {FAILED: "ValueError", SILENT: "stacks"}.get(how, "")
    return Outcome(how, int(steps), longest, last)


def play(launches: Launches, *outcomes: Outcome, made: int = 0) -> Comparison:
    """Play whole launches with these outcomes, alternating stock and tritonddp, and use all."""
    launches.in_turns, launches._made = False, made
    steps = ([float(number) for number in range(each.steps)] for each in outcomes)
    left = [Played(steps={0: s, 1: s}, outcome=o) for s, o in zip(steps, outcomes, strict=True)]
    launches._alone = lambda label: left.pop(0)  # type: ignore[method-assign]
    launches.play()
    assert not left
    comparison = Comparison(launches, "stopped")
    assert list(text(comparison))
    assert page(comparison)
    assert as_json(comparison)
    return comparison


ENDS = "In launch 1, the script {} after its last step, step 60, with stock, and {} with tritonddp."


@pytest.mark.parametrize(
    ("stock", "ours", "sentence", "last"),
    [
        (
            "failed 3",
            "ended 60",
            "stock failed after 3 steps. tritonddp ended after 60 steps.",
            "ValueError",
        ),
        ("hangs 1", "ended 60", "stock hangs after 1 steps, no rank completed a step", "stacks"),
        (
            "ended 60",
            "failed 0",
            "tritonddp failed after 0 steps. stock ended after 60 steps.",
            "ValueError",
        ),
        ("failed 60", "failed 60", ENDS.format("failed", "failed"), "ValueError"),
        ("hangs 60", "ended 60", ENDS.format("hangs", "ended"), None),  # it may evaluate
        ("ended 60", "hangs 60", ENDS.format("ended", "hangs"), None),
        ("ended 2", "ended 2", "no significant difference", None),
    ],
)
def test_a_contender_that_fails_alone_is_the_verdict(stock, ours, sentence, last, launches):
    outcomes = outcome(stock), outcome(ours)
    comparison = play(launches, *outcomes)
    assert launches.pairs[0].outcomes == outcomes
    assert next(iter(comparison.sentences)).startswith(sentence)
    assert comparison.has_findings is sentence.startswith("tritonddp failed")
    assert launches.pairs[0].has_failed is (outcomes[0].how == outcomes[1].how == FAILED)
    assert bool(_stopped(launches, 9, Namespace(within=2, seconds=120))) is (last is not None)
    assert list(last_words(comparison))[1:] == ([] if last is None else [f"    {last}"])


def test_a_hang_at_the_end_of_an_earlier_launch_is_reported(launches: Launches) -> None:
    play(launches, outcome("hangs 60"), outcome("ended 60"))
    comparison = play(launches, outcome("ended 60"), outcome("ended 60"))
    assert next(iter(comparison.sentences)) == ENDS.format("hangs", "ended")


def test_a_slow_step_is_not_a_hang(launches: Launches) -> None:
    """If the other contender needed 20 s for a step, 60 s without a step are a hang, not 30 s."""
    slow = outcome("ended 60", longest=20.0)
    comparison = play(launches, outcome("hangs 1"), slow, slow, slow)
    assert launches.patience == pytest.approx(60)
    assert next(iter(comparison.sentences)).startswith("no significant difference")


@pytest.mark.parametrize(
    ("stock", "ours", "made", "error", "sentence"),
    [
        ("failed 1", "failed 0", 0, contender.ScriptError, "stock:\nValueError\nThe last lines of"),
        ("ended 60", "ended 0", 0, EndedEarly, "has probably resumed"),
        ("ended 1", "ended 1", 0, contender.ScriptError, "it made 1 step, "),
        ("ended 60", "ended 2", 90, EndedEarly, "one made 90:"),
    ],
)
def test_launches_that_cannot_be_compared_say_why(stock, ours, made, error, sentence, launches):
    with pytest.raises(error, match=sentence):
        play(launches, outcome(stock), outcome(ours), made=made)


@pytest.mark.parametrize(("how", "error"), [(FAILED, _NotInTurns), (ENDED, RankEnded)])
def test_a_script_that_ends_during_an_order_is_a_failure_or_the_end(how, error, launches):
    def ending(*answers: Any) -> Any:
        """A contender with these answers to orders."""
        ended = {"end.return_value": Outcome(how, 900, 0.1), "finish.side_effect": answers}
        return mock.Mock(label="tritonddp", **ended)

    with pytest.raises(error):
        launches._turn([ending(False, RankEnded), ending(False, RankEnded)], 5)
    launches.plan = Plan.of(0.01)
    with pytest.raises(error):
        launches._probe(ending(RankEnded))


def test_two_contenders_that_make_no_further_step_have_ended(launches: Launches) -> None:
    play(launches, outcome("hangs 60"), outcome("hangs 60"))
    assert launches._most == 60  # the next launches end there


def test_the_error_of_the_first_rank_that_fails_is_shown(tmp_path: Path) -> None:
    log, own = tmp_path / "log", "[rank1]: ValueError: bad sample 1234"
    log.write_text("\n".join(["[rank1]: Traceback", own, *["[rank0]: line"] * 50, "last"]))
    shown = contender.Contender.last_lines(mock.Mock(_log=log)).splitlines()
    assert (shown[0], shown[-1], len(shown)) == (own, "last", 1 + contender._LINES)


def test_ranks_write_their_stacks_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks share one log, in which the lines of two stacks would be mixed."""
    calls = mock.Mock()
    monkeypatch.setattr(contender, "time", calls)
    monkeypatch.setattr(os, "kill", lambda pid, _: calls.kill(pid))
    contender.Contender._write_stacks(mock.Mock(pids=[7, 8]))
    kills = mock.call.kill(7), mock.call.sleep(mock.ANY), mock.call.kill(8)
    assert calls.mock_calls == [*kills, mock.call.sleep(mock.ANY)]


# The recorder

TIMES = "began", "communication", "overlap", "forward", "backward"


@pytest.mark.parametrize(
    ("events", "kinds", "backwards"),
    [
        ("bnbb", "uss", [1, 2, 1]),  # without an optimizer, each backward that reduces is a step
        ("bbbbo" * 3, "u" + "s" * 11, [1] * 12),
        ("Obbbbs" * 3, "uuuusss", [1, 1, 1, 1, 0, 4, 4]),  # all microbatches reduce
        ("Obosb" * 3, "usss", [1, 0, 2, 2]),
        ("Obbbb", "uuuu", [1, 1, 1, 1]),  # an optimizer that has not stepped yet
    ],
)
def test_steps_are_those_of_the_optimizer_or_else_backwards(events, kinds, backwards, monkeypatch):
    """Which events the rank reports as steps (s), and which as backwards that may be steps (u).

    Events: b: a backward; n: a backward in no_sync; O: the script creates an optimizer; s: this
    optimizer steps; o: an optimizer of another model steps.
    """
    made, sent = recorder.Recorder({}), []
    made._connection, made._left = object(), 100
    made._order = {"count": 100, "timed": 100, "parts": False, "each": True}
    monkeypatch.setattr(made, "_send", sent.append)
    monkeypatch.setattr(made, "_capture", lambda what, title: None)
    model = torch.nn.Linear(1, 1)
    made._models.append(weakref.ref(model))
    made._parameters = set(map(id, model.parameters()))
    optimizer, other = (torch.optim.SGD(of.parameters()) for of in (model, torch.nn.Linear(1, 1)))
    for event in events:
        model.require_backward_grad_sync = event == "b"  # type: ignore[assignment]
        if event in "bn":
            made._counting_backward(model(torch.ones(1)))
        elif event == "O":
            made._optimizers.add(optimizer)
        else:
            made._after_optimizer(optimizer if event == "s" else other)
    assert "".join("s" if "step" in each else "u" for each in sent) == kinds
    assert [each["backwards"] for each in sent] == backwards
    is_by_backward = kinds[0] == "u" and "s" in kinds and "O" not in events
    assert made._steps == kinds.count("s") + is_by_backward  # the first backward was one, too


def test_the_time_to_read_the_parts_of_a_step_does_not_count(monkeypatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(recorder, "time", mock.Mock(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(recorder, "logged_times", lambda model: dict.fromkeys(TIMES, 1))
    model, made = torch.nn.Linear(1, 1), recorder.Recorder({})
    made._models.append(weakref.ref(model))
    made._start_clock()
    made._note_parts()
    assert made._began == 1  # 0 at the start, and one second to read
    assert made._parts == {"forward": 1, "backward": 1, "exposed": 0}
