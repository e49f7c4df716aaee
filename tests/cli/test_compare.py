"""``tritonddp compare`` on real scripts: what is planted is found, and nothing where nothing is."""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import time
import weakref
from contextlib import ExitStack
from multiprocessing.connection import Client
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import launched
import pytest
import torch
from clock import Clock

from tritonddp.cli.compare import _stopped
from tritonddp.cli.comparison import contender, recorder
from tritonddp.cli.comparison.contender import (
    Contender,
    Outcome,
    Played,
    RankEnded,
    ScriptError,
)
from tritonddp.cli.comparison.page import page
from tritonddp.cli.comparison.report import Comparison, as_json, last_words, text
from tritonddp.cli.comparison.turns import EndedEarly, Launches, Pair, Plan, _NotInTurns
from tritonddp.cli.comparison.verdict import _QUANTILES, Launch
from tritonddp.cli.main import main
from tritonddp.cli.terminal import Progress

PROGRAMS = launched.ROOT / "tests" / "cli" / "programs"
PLANTED = PROGRAMS / "planted.py"
ENDLESS = "1000000"
ONE_LAUNCH = ("--seconds", "0")


def compare(*words: str | Path, planted: str = "", timeout: float = 300) -> tuple[int, Any, str]:
    """Exit code, the JSON object and what was said beside it."""
    variables = {"PYTHONPATH": str(launched.ROOT), "PLANTED": planted}
    arguments = ("-m", "tritonddp", "compare", "--json", *words)
    done = launched.run(*arguments, nproc=None, env=variables, timeout=timeout)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_a_wrong_gradient_is_found_and_figures_are_there(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    script = shutil.copy(PLANTED, tmp_path)  # a name that no other test has
    code, found, said = compare(*ONE_LAUNCH, "--html", html, script, ENDLESS, planted="wrong")
    assert code == 1
    first, *_ = found["correctness"]
    assert first["title"] == "gradients of backward 1"
    assert first["names"] == ["0.bias"]
    assert first["largest"] == pytest.approx(0.001, rel=0.01)
    assert first["shared"] == [True, True]
    plan = found["plan"]
    for played in found["launches"][0]:
        pairs = len(played["blocks"])
        assert pairs == plan["pairs"]
        assert min(played["blocks"]) > 0.01  # what the script sleeps in each step
        assert played["peak_bytes"] > 2**26
        assert sum(played["shares"].values()) == pytest.approx(1)
    # Four parts make up the step, and the ratio is the quotient of the columns.
    step, *parts = found["rows"][:5]
    for column in ("first", "second"):
        assert sum(part[column] for part in parts) == pytest.approx(step[column])
    assert found["verdict"]["value"] == pytest.approx(step["second"] / step["first"])
    assert "0.bias" in html.read_text()
    assert not re.search(r"(src|href)=|url\(|@import", html.read_text())  # it needs no network
    assert not left_over(script)
    seconds = [float(each) for each in re.findall(r"^\[ *(\d+) s\]", said, re.MULTILINE)]
    assert seconds[0] == 0
    assert max(b - a for a, b in itertools.pairwise(seconds)) < 15


def left_over(script: str) -> list[str]:
    """Processes of a comparison that are still there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if script.encode() in words and entry.parent.name != str(os.getpid()):
            found.append(words.decode())
    return found


def new_launches(folder: Path) -> Launches:
    """None is played yet."""
    return Launches([], "2", ("stock", "tritonddp"), folder, Progress())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such_script.py"], "there is no file no_such_script.py"),
        (["--html", "/no/such/folder/a.html", str(PLANTED)], "there is no folder /no/such/folder"),
    ],
)
def test_what_cannot_be_carried_out_is_said(words: list[str], said: str, capsys: Any) -> None:
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupt_shows_what_is_known(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def play(launches: Launches) -> None:
        if launches.pairs:
            raise KeyboardInterrupt
        launches.started = time.monotonic()
        time.sleep(0.01)
        launches.plan = Plan.of(1.0)
        launches.pairs.append(Pair(Played(), Played(), Launch(1.0, 0.9, 0.001)))

    monkeypatch.setattr(Launches, "play", play)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # or later tests had its handlers
    assert main(["compare", str(PLANTED)]) == 130
    said = capsys.readouterr()
    first, last = said.out.split("A FIRST TABLE, of one launch")[1].split("stock  tritonddp")[1:]
    assert "0.900 (" in first
    assert "0.900 (" in last
    assert "others may differ from it by more.\n" in last
    assert "\nInterrupted; launches until then: 1.\n" in last
    assert re.search(r"; at most \d+ more of \d+ s$", said.err, re.MULTILINE)


def test_an_interrupt_before_anything_is_known_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def play(launches: Launches) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Launches, "play", play)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["compare", "--json", str(PLANTED)]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted"}


@pytest.mark.parametrize("how", ["failed", "ended"])
def test_the_end_of_a_script_after_a_long_silence_is_looked_at(how: str, tmp_path: Path) -> None:
    def late() -> Any:
        answers = iter([False])

        def finish(patience: float) -> bool:
            for answer in answers:
                return answer
            raise RankEnded

        told: dict[str, Any] = {"label": "tritonddp", "give": lambda *_: None, "finish": finish}
        return SimpleNamespace(end=lambda: Outcome(how, 900, 0.1), **told)

    with pytest.raises(RankEnded if how == "ended" else _NotInTurns):
        new_launches(tmp_path)._turn([late(), late()], 5)


def test_who_connects_and_is_no_rank_holds_nothing_up(tmp_path: Path) -> None:
    process = SimpleNamespace(poll=lambda: None)
    told: dict[str, Any] = {"ranks": {}, "pids": [], "world_size": 0, "last_line": str}
    contender: Any = SimpleNamespace(token="stock-1", process=process, **told)
    launches = new_launches(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as others:
        for words in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n"):
            other = others.enter_context(socket.create_connection(listener.getsockname()))
            other.sendall(words)
        late = Timer(60, others.close)  # what waits for them goes on
        late.start()
        with Client(listener.getsockname()) as rank:
            hello = {"contender": "stock-1", "rank": 0, "world_size": 1, "pid": 1}
            rank.send_bytes(json.dumps(hello).encode())
            launches._gather(listener, [contender])
            assert late.is_alive()
            contender.ranks[0].send_bytes(b"{}")
            assert rank.recv_bytes() == b"{}"
            contender.ranks[0].close()
        late.cancel()


def test_ranks_write_their_stacks_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Into one log, in which lines of two would be mixed."""
    clock = Clock()
    monkeypatch.setattr(contender, "time", clock)
    asked: dict[int, float] = {}
    monkeypatch.setattr(os, "kill", lambda pid, _: asked.update({pid: clock.perf_counter()}))
    hanging: Any = SimpleNamespace(pids=[7, 8])
    contender.Contender._write_stacks(hanging)
    assert asked[8] > asked[7]
    assert clock.perf_counter() > asked[8]


def test_blocks_fit_the_steps() -> None:
    assert Plan.of(0.002) == Plan(warmup=15, block=50, skipped=1, pairs=32)
    assert Plan.of(1.0) == Plan(warmup=5, block=1, skipped=0, pairs=6)


def test_slow_first_steps_do_not_make_blocks_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = new_launches(tmp_path)
    turn = lambda contenders, count, skipped=0: [0.2 if skipped else 0.002] * 2  # noqa: E731
    monkeypatch.setattr(launches, "_turn", turn)
    launches._warm_up([])
    assert launches.plan == Plan.of(0.002)


def test_to_read_the_times_of_a_step_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(recorder, "logged_times", lambda model: clock.sleep(0.05))
    model, follower = torch.nn.Linear(1, 1), recorder.Recorder({})
    follower._models.append(weakref.ref(model))
    follower._start_clock()
    follower._note_parts()
    assert follower._began == follower._now() > 0


@pytest.mark.parametrize(("how", "error"), [("failed", _NotInTurns), ("ended", RankEnded)])
def test_a_failure_while_parts_are_noted_is_one(
    how: str, error: type[Exception], tmp_path: Path
) -> None:
    def finish(patience: float) -> bool:
        raise RankEnded

    launches, outcome = new_launches(tmp_path), Outcome(how, 900, 0.1)
    launches.plan = Plan.of(0.01)
    told: dict[str, Any] = {"label": "tritonddp", "give": lambda *_, **__: None}
    contender: Any = SimpleNamespace(finish=finish, end=lambda: outcome, **told)
    with pytest.raises(error):
        launches._probe(contender)


@pytest.mark.thorough
def test_a_script_with_habits_is_compared() -> None:
    words = (*ONE_LAUNCH, PROGRAMS / "unusual.py", ENDLESS)
    code, found, _ = compare(*words)
    assert code in (0, 1), found
    titles = [each["title"] for each in found["correctness"]]
    assert titles[:3] == [f"gradients of backward {number}" for number in (1, 2, 3)]
    assert {each["state"] for each in found["correctness"]} == {"identical bits"}
    assert found["verdict"]["sentences"][0].endswith("others may differ from it by more.")


@pytest.mark.thorough
def test_of_a_step_alone_gradients_are_compared() -> None:
    code, found, _ = compare(*ONE_LAUNCH, PLANTED, "1")
    assert code == 0
    assert [each["state"] for each in found["correctness"]] == ["identical bits"]
    assert "it made 1 step, and 2 are needed for times" in found["stopped"]


@pytest.mark.long
def test_a_script_that_fails_shows_its_last_lines() -> None:
    code, found, said = compare(*ONE_LAUNCH, "--one-at-a-time", PLANTED, "no number")
    assert code == 3
    assert "stock failed after 0 steps" in found["error"]
    assert "invalid literal for int() with base 10: 'no number'" in said


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [2, 20, 60])
def test_a_short_script_is_compared_in_whole_launches(steps: int) -> None:
    code, found, said = compare("--seconds", "40", PLANTED, str(steps))
    assert code in (0, 1), found
    assert "too short for blocks of steps in turns" in said
    assert {each["state"] for each in found["correctness"]} == {"identical bits"}
    assert len(found["correctness"]) == min(steps, 3) + 1
    rows = {row["label"]: row for row in found["rows"]}
    assert rows["step, ms"]["first"] > 10
    assert rows["forward, ms"]["first"] is None
    assert rows["backwards a step"]["first"] == 1
    counted = f"steps {min(20, steps // 2) + 1} to {steps} of "
    assert counted in found["verdict"]["sentences"][-1]


@pytest.mark.thorough
def test_a_tenth_more_is_found() -> None:
    """Beside stock itself: what tritonddp wins would be taken off the tenth."""
    code, found, _ = compare("--against", "stock", PLANTED, ENDLESS, planted="slow", timeout=580)
    assert code == 1
    assert "slower by" in found["verdict"]["sentences"][0]
    assert 1.05 < found["verdict"]["value"] < 1.15


@pytest.mark.thorough
@pytest.mark.parametrize("repeated", range(10))
@pytest.mark.parametrize("program", ["planted.py", "unusual.py"])
def test_stock_beside_stock_is_no_difference(program: str, repeated: int) -> None:
    code, found, _ = compare("--against", "stock", PROGRAMS / program, ENDLESS, timeout=580)
    assert code == 0, found["verdict"]
    assert found["verdict"]["sentences"][0].startswith("no difference")
    assert {each["state"] for each in found["correctness"]} == {"identical bits"}


@pytest.mark.thorough
def test_one_at_a_time(tmp_path: Path) -> None:
    code, found, _ = compare(*ONE_LAUNCH, "--one-at-a-time", PLANTED, ENDLESS)
    assert code in (0, 1)
    assert [each["state"] for each in found["correctness"]] == ["identical bits"] * 4
    assert "steps 21 to" in found["verdict"]["sentences"][-1]
    assert len(found["launches"]) == 1


@pytest.mark.parametrize(
    ("reach", "launches", "fitting", "said"),
    [
        (0.01, 3, 5, "Known to 2 % after 3 launches."),
        (0.01, 1, 5, ""),
        (0.05, 4, 2, ""),
        (0.05, 4, 0, "In 120 s the ratio could not be known to 2 %: a longer"),
        (0.05, 1, 0, "In 120 s the ratio could not be known to 2 %: a longer"),
        (0.05, 2, 0, ""),
    ],
)
def test_the_last_launch_is_said_with_its_reason(
    reach: float, launches: int, fitting: int, said: str, tmp_path: Path
) -> None:
    arguments = argparse.Namespace(within=2, seconds=120)
    played = new_launches(tmp_path)
    # The interval of equal launches is that of their blocks.
    error = math.log1p(reach) * math.sqrt(launches) / _QUANTILES[min(launches - 2, 9)]
    played.pairs = [Pair(Played(), Played(), Launch(1.0, 1.0, error))] * launches
    stopped = _stopped(played, fitting, arguments)
    assert stopped.startswith(said)
    assert bool(stopped) is bool(said)


ENDED, FAILED, SILENT = "ended", "failed", "hangs"


def play(
    tmp_path: Path, *outcomes: tuple[Outcome, Outcome], made: int = 0
) -> tuple[Launches, list[Outcome]]:
    """Play whole launches that end so, first stock and then tritonddp."""
    launches, left = new_launches(tmp_path), [each for pair in outcomes for each in pair]
    launches.in_turns, launches._made = False, made

    def alone(label: str) -> Played:
        outcome = left.pop(0)
        steps = [float(number) for number in range(outcome.steps)]
        return Played(steps={0: steps, 1: steps}, outcome=outcome)

    launches._alone = alone  # type: ignore[method-assign]
    launches.play()
    return launches, left


def verdict(launches: Launches) -> tuple[str, bool]:
    """The first sentence, and whether something was found."""
    comparison = Comparison(launches, "stopped")
    assert list(text(comparison))
    assert page(comparison)
    assert as_json(comparison)
    return next(iter(comparison.sentences)), comparison.has_findings


@pytest.mark.parametrize(
    ("stock", "ours", "said", "is_found"),
    [
        (
            Outcome(FAILED, 3, 0.1, "ValueError"),
            Outcome(ENDED, 60, 0.1),
            "stock failed after 3 steps. tritonddp does not: it ended after 60 steps.",
            False,
        ),
        (
            Outcome(SILENT, 1, 0.1, "stacks"),
            Outcome(ENDED, 60, 0.1),
            "stock hangs after 1 steps, no rank made a step for 30 s. tritonddp does not",
            False,
        ),
        (
            Outcome(ENDED, 60, 0.1),
            Outcome(FAILED, 0, 0.1, "ValueError"),
            "tritonddp failed after 0 steps. stock does not: it ended after 60 steps.",
            True,
        ),
        (
            Outcome(FAILED, 60, 0.1, "ValueError"),
            Outcome(FAILED, 60, 0.1, "ValueError"),
            "The script failed after its last step, step 60, with stock; tritonddp failed.",
            False,
        ),
        (
            Outcome(SILENT, 60, 0.1, "stacks"),
            Outcome(ENDED, 60, 0.1),
            "The script hangs after its last step, step 60, with stock; tritonddp ended.",
            False,
        ),
        (Outcome(ENDED, 2, 0.1), Outcome(ENDED, 2, 0.1), "no difference", False),
    ],
)
def test_the_contender_that_fails_alone_is_the_verdict(
    stock: Outcome, ours: Outcome, said: str, is_found: bool, tmp_path: Path
) -> None:
    launches, _ = play(tmp_path, (stock, ours))
    assert launches.pairs[0].outcomes == (stock, ours)
    sentence, has_findings = verdict(launches)
    assert sentence.startswith(said)
    assert has_findings is is_found
    comparison = Comparison(launches, "stopped")
    assert comparison.has_failed is (stock.how == ours.how == FAILED)
    last = next((each.last for each in (stock, ours) if not each.is_right), None)
    if "after its last step" in said and not comparison.has_failed:
        last = None  # it may evaluate
    assert list(last_words(comparison))[1:] == ([] if last is None else [f"    {last}"])


def test_a_slow_step_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """The other contender has needed 20 s for one: 30 s of silence say nothing, 60 s do."""
    silent, slow = Outcome(SILENT, 1, 0.1), Outcome(ENDED, 60, 20.0)
    launches, left = play(tmp_path, (silent, slow), (slow, slow))
    assert not left
    assert launches.patience == pytest.approx(60)
    assert verdict(launches)[0].startswith("no difference")


def test_both_that_make_no_further_step_have_come_to_the_end(tmp_path: Path) -> None:
    silent = Outcome(SILENT, 60, 0.1)
    launches, left = play(tmp_path, (silent, silent))
    assert not left
    assert launches._most == 60  # nobody waits again
    assert launches.times


@pytest.mark.parametrize(
    ("stock", "ours", "error", "said"),
    [
        (Outcome(FAILED, 1, 0.1, "a\nb"), Outcome(FAILED, 0, 0.1, "c"), ScriptError, "a\nb\nThe"),
        (Outcome(ENDED, 60, 0.1), Outcome(ENDED, 0, 0.1), EndedEarly, "has probably resumed"),
        (Outcome(ENDED, 1, 0.1), Outcome(ENDED, 1, 0.1), ScriptError, "it made 1 step, "),
        (Outcome(ENDED, 60, 0.1), Outcome(ENDED, 2, 0.1), EndedEarly, "one made 90:"),
    ],
)
def test_launches_that_cannot_be_compared_say_why(
    stock: Outcome, ours: Outcome, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        play(tmp_path, (stock, ours), made=90 if "90" in said else 0)
    assert said in str(caught.value)


def follower(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[recorder.Recorder, list[Any], torch.nn.Module]:
    """A recorder without a launcher, what it sends, and the model whose backwards it counts."""
    made, sent = recorder.Recorder({}), []
    made._connection, made._left = object(), 100
    made._order = {"count": 100, "timed": 100, "parts": False, "each": True}
    monkeypatch.setattr(made, "_send", sent.append)
    monkeypatch.setattr(made, "_capture", lambda what, title: None)
    model = torch.nn.Linear(1, 1)
    model.require_backward_grad_sync = True  # type: ignore[assignment]
    made._models.append(weakref.ref(model))
    return made, sent, model


def test_backwards_are_the_steps_of_a_script_without_an_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, sent, model = follower(monkeypatch)
    for is_reduced in (True, False, True, True):
        model.require_backward_grad_sync = is_reduced  # type: ignore[assignment]
        made._counting_backward(model(torch.ones(1)))
    assert made._steps == 3
    # The first one was counted before it was known to be a step.
    assert [each["backwards"] for each in sent] == [1, 2, 1]
    assert ["step" in each for each in sent] == [False, True, True]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_backwards_before_an_optimizer_are_none_of_its_steps(
    has_optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all microbatches reduce, or several losses."""
    made, _, model = follower(monkeypatch)
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)
    made._note_optimizers()
    made._parameters = set(map(id, model.parameters()))
    optimizer = torch.optim.SGD((model if has_optimizer else torch.nn.Linear(1, 1)).parameters())
    for _ in range(3):
        for _ in range(4):
            made._counting_backward(model(torch.ones(1)))
        made._after_optimizer(optimizer)
    assert made._steps == (3 if has_optimizer else 12)


def test_the_steps_of_an_optimizer_are_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sent, model = follower(monkeypatch)
    made._parameters = set(map(id, model.parameters()))
    optimizer, other = (torch.optim.SGD(of.parameters()) for of in (model, torch.nn.Linear(1, 1)))
    for _ in range(3):
        made._counting_backward(model(torch.ones(1)))
        made._after_optimizer(other)
        made._after_optimizer(optimizer)
        made._counting_backward(model(torch.ones(1)))
    assert made._steps == 3
    assert [each["backwards"] for each in sent if "step" in each] == [0, 2, 2]


def test_an_optimizer_that_never_steps_leaves_the_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, sent, model = follower(monkeypatch)
    made._parameters = set(map(id, model.parameters()))
    optimizer = torch.optim.SGD(model.parameters())
    made._optimizers.add(optimizer)
    for _ in range(4):
        made._counting_backward(model(torch.ones(1)))
    assert made._steps == 0
    assert ["unstepped" in each for each in sent] == [True] * 4
    made._after_optimizer(optimizer)
    assert "step" in sent[-1]  # the others are not its steps then


def test_backwards_are_steps_if_there_are_no_others() -> None:
    played = Contender.__new__(Contender)
    played.played, played.longest, played._unstepped = Played(), 0.1, {0: [1.0, 2.0], 1: [1.0, 3.0]}
    played.ranks = dict.fromkeys((0, 1))  # type: ignore[assignment]
    assert played.outcome("ended").steps == 2
    played.played, played._unstepped = Played(steps={0: [1.0], 1: [1.0]}), {0: [1.0, 2.0], 1: []}
    assert played.outcome("ended").steps == 1
