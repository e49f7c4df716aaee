"""The pages' figures are those of the result files, and whatever was measured can be rendered."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import bench
import deadline
import pytest
import report
import report_tables
from convergence_table import compared

FACTS = {
    "date": "2026-11-21T09:00:00+00:00",
    "cpu": "Some CPU",
    "usable_cores": 2,
    "load_average": [0.1, 0.1, 0.1],
    "torch": "2.13.0",
    "gpu": None,
    "tritonddp": {"path": "", "commit": "0123456789abcdef", "dirty": False},
}
RANKS = {"world_size": 2, "backend": "gloo"}
SPREAD = {"q1": 0.010, "median": 0.0112, "q3": 0.014}
MODES = ("", " views")


def ratio(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.013, "high": median + 0.021}


def comparison(best: str, unused: bool) -> dict[str, Any]:
    return {
        "of": "whole steps" if unused else "backwards",
        "best": best,
        "ours": ratio(0.765 if unused else 0.987),
        "again": ratio(1.001),
        "bound": 0.9 if unused else 1.02,
        "bound_on": "ratio",
        "verdict": "met",
    }


def step_model(unused: bool) -> dict[str, Any]:
    names = [f"{who}{mode}" for mode in MODES for who in ("stock", "stock find_unused", "ours")]
    every = ["unwrapped", *names]
    return {
        "raw_seconds_per_rank": [{name: [[0.01] * 6] for name in every}],
        "seconds": dict.fromkeys(every, SPREAD),
        "overhead_seconds": dict.fromkeys(names, 0.0034),
        "wire_bytes": dict.fromkeys(every, 1_250_000),
        "collectives": dict.fromkeys(every, 2),
        "launches": dict.fromkeys(every, None),
        "comparisons": {
            "copies": comparison("stock", unused),
            "views": comparison("stock views", unused),
        },
    }


def pytest_rows(*infos: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"group": str(number), "extra_info": info} for number, info in enumerate(infos)]


def kernel_rows() -> list[dict[str, Any]]:
    common = {"parameters": "resnet50", "dtype": "fp32", "bucket": "whole", "bytes": 204e6}
    return pytest_rows(
        *(
            {
                **common,
                "direction": direction,
                "contender": contender,
                "gb_per_s": 20.5,
                "of_ceiling": ratio(0.912),
            }
            for direction in ("flatten", "unflatten")
            for contender in ("tritonddp", "_foreach_copy_", "device copy")
        )
    )


def network_result(rate: float | None) -> dict[str, Any]:
    contender = {"seconds": SPREAD, "over": {"limit": None if rate is None else 1.034}}
    names = ("unwrapped", "all-reduce alone", "stock", "ours", "stock views", "ours views")
    return {
        "hosts": 2,
        "rounds": 6,
        "rate_bits_per_s": rate,
        "model": "mlp",
        "payload_bytes": 42_600_000,
        "limit_seconds": 0.0108,
        "contenders": dict.fromkeys(names, contender),
        "comparisons": {
            "copies": {"contender": "ours", "best": "stock", "ours": ratio(0.99)},
            "views": {"contender": "ours views", "best": "stock views", "ours": ratio(0.98)},
        },
    }


def by_wire(rate: float | None) -> dict[str, Any]:
    result = network_result(rate)
    contender = {**result["contenders"]["stock"], "sent_bytes": 21_300_000}
    one = {"contender": "ours bf16", "best": "stock", "ours": ratio(0.5)}
    contenders = {"stock": contender, "ours bf16": contender}
    return {**result, "contenders": contenders, "comparisons": {"bf16": one}}


def trained(*wires: tuple[str, list[float]]) -> dict[str, Any]:
    losses = {wire: [[9 * final, 2 * final, final] for final in finals] for wire, finals in wires}
    return {
        "target": "character",
        "parameters": 636_128,
        "steps": 30,
        "batch_size": 4,
        "optimizer": "AdamW, 0.003",
        "held_out_targets": 32_000,
        "same_bits_after_steps": 90,
        "sent_bytes": dict.fromkeys(losses, 2_544_512),
        "comparisons": compared(losses),
        "evaluated_after": [10, 20, 30],
        "losses": losses,
    }


def sweep_row() -> dict[str, Any]:
    choices = {"1024 x 4": 0.9, "2048 x 8": 0.95}
    return {
        "direction": "flatten",
        "parameters": "resnet50",
        "dtype": "bf16",
        "bucket": "25MiB",
        "bytes": 52e6,
        "best": "2048 x 8",
        "choices": {name: {"of_ceiling": {"median": share}} for name, share in choices.items()},
    }


COMPILED = {
    "models": {
        "mlp": {
            "contenders": {name: {"graphs": 1, "seconds": SPREAD} for name in ("stock", "ours")},
            "above_bare": {"ours": SPREAD},
            "exposed": {"ours": {"seconds": SPREAD}},
            "ratios": {"ours / stock": ratio(0.765)},
        }
    }
}
RESULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "compiled": COMPILED,
        "compiled_gloo": COMPILED,
        "step": {
            "models": {
                "transformer": step_model(unused=False),
                "branchy": step_model(unused=True),
                "bad": {"error": "wrong gradients"},
            },
            **RANKS,
        },
        "detection": {
            "models": {
                "branchy": {
                    "raw_seconds_per_rank": [{"ours": [[0.01] * 6]}],
                    "seconds": {"ours told": SPREAD},
                    "comparisons": [
                        {**comparison("ours told", unused=False), "gradients": "copies"},
                        {
                            **comparison("stock find_unused", unused=True),
                            "gradients": "views",
                            "bound": None,
                            "verdict": None,
                        },
                    ],
                    "parts": {
                        "copies": {
                            "of": "ours told",
                            "query": 0.000137,
                            "write_flags": 0.00008,
                            "read_flags": None,
                            "flag_bytes": 3200,
                            "wire_bytes": 1_692_896,
                        }
                    },
                },
                "bad": {"error": "wrong gradients"},
            },
            **RANKS,
        },
        "memory": {
            "models": {
                "mlp": {
                    name: {
                        "buckets": 2**20,
                        "largest_bucket": 2**20,
                        "above": {"first": 2**20, "steady": 0},
                        "holds": True,
                    }
                    for name in ("stock", "ours")
                }
            },
            **RANKS,
        },
        "network": {"results": [network_result(1e9), network_result(None)]},
        "network_hosts": {
            "results": [network_result(1e9) | {"hosts": 4, "ranks_per_host": 2}],
        },
        "network_wire": {"results": [by_wire(1e9), by_wire(None)]},
        "exchange": {
            "rows": [
                {
                    "ranks": 2,
                    "bytes": 1 << 20,
                    "seconds": {"gloo": 4e-3, "memory": 1e-3, "copies": 5e-4, "mpich": 2e-3},
                },
                {
                    "ranks": 3,
                    "bytes": 1 << 20,
                    "seconds": {"gloo": 4e-3, "memory": 2e-3, "copies": 5e-4},
                },
            ]
        },
        "convergence": {
            "seeds": [0, 1, 2],
            "tasks": {
                "text": trained(
                    ("fp32", [1.5, 1.52, 1.51]),
                    ("bf16", [1.51, 1.52, 1.5]),
                    ("int8", [1.5, 1.51, 1.51]),
                    ("int8 without feedback", [1.6, 1.61, 1.59]),
                )
            },
            **RANKS,
        },
        "host": {
            "benchmarks": pytest_rows(
                *(
                    {"kind": kind, "configuration": name, "us": {column: SPREAD}}
                    for kind, column in (("parameter", "all"), ("bucket", "launch"))
                    for name in ("unwrapped", "stock", "ours")
                )
            )
        },
        "kernels": {"benchmarks": kernel_rows()},
    },
    "some-gpu": {
        "gpu": {
            "parts": {
                "kernels": {"result": {"benchmarks": kernel_rows()}},
                "sweep": {"result": {"rows": [sweep_row()]}},
            },
            "bounds": [
                {
                    "bound": "share of the copy",
                    "limit": 0.9,
                    "at_least": True,
                    "unit": "",
                    "verdict": "met",
                    "worst": {"value": 0.912, "where": "kernels flatten"},
                    "met_by": 2,
                    "of": 2,
                    "not_run": [],
                },
                {
                    "bound": "host time",
                    "limit": 2.0,
                    "at_least": False,
                    "unit": "us",
                    "verdict": "not run",
                    "worst": None,
                    "met_by": 0,
                    "of": 0,
                    "not_run": ["host: not asked for"],
                },
            ],
        }
    },
}
for machine in RESULTS.values():
    for result in machine.values():
        result["machine"] = FACTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for machine, benchmarks in RESULTS.items():
        (tmp_path / machine).mkdir()
        for benchmark, content in benchmarks.items():
            (tmp_path / machine / f"{benchmark}.json").write_text(json.dumps(content))
    return tmp_path


def copied_pages(folder: Path) -> list[Path]:
    """README and docs/benchmarks*.md, to be written to."""
    pages = [folder / page.name for page in report.PAGES]
    for page, original in zip(pages, report.PAGES, strict=True):
        page.write_text(original.read_text())
    return pages


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    return report.main()


def test_the_tree_s_tables_and_pages_are_those_of_its_result_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(monkeypatch, "--check") == 0, "run: make figures"


def test_figures_come_from_the_files_and_a_changed_one_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "draw", lambda *_: None)
    pages = readme, *others = copied_pages(folder)
    options = ("--results", folder, "--pages", *pages)
    assert run(monkeypatch, "--check", *options) == 1
    assert run(monkeypatch, "--figures", *options) == 0
    assert run(monkeypatch, "--check", *options) == 0
    text = readme.read_text()
    assert "backward of a transformer | 0.987 (0.974 to 1.008) |" in text
    assert "stock's `find_unused_parameters` | 0.765 (0.752 to 0.786) |" in text
    assert "| host time | ≤ 2 us | not run | 0 of 0 | host: not asked for |" in text
    assert "Not measured." not in text
    text = "\n".join(page.read_text() for page in others)
    assert "| transformer | copies | stock | 0.987 | 0.974 to 1.008 |" in text
    assert "| branchy | views | stock views | 0.765 |" in text
    assert "| branchy | copies | backwards | ours told | 0.987 | 0.974 to 1.008 |" in text
    assert "| 2 | 1 Gbit/s | copies | 10.8 | 11.2 | 1.034 |" in text
    assert "| 2 | 1 Gbit/s | bf16 | 21.30 | 11.2 | 11.2 | 1.034 | 2.00 |" in text
    assert "1.80: met |" in text
    assert "| 2 of 2 | 1 Gbit/s | copies | 10.8 | 11.2 | 1.034 |" in text
    assert "| 2 | 1024 | 4.00 | 1.00 | 4.00 | 2.00 | 0.50 | 0.50 |" in text
    assert "| 3 | 1024 | 4.00 | 2.00 | 2.00 | - | - | 0.25 |" in text
    assert "| host time | ≤ 2 us | not run | 0 of 0 | host: not asked for |" in text
    assert "| mlp | 1.00 | 0.00 | 0.00 | - | - |" in text
    assert "holds in 1 of 1 cases" in text
    assert "bad: not timed: wrong gradients" in text
    assert "tritonddp 0123456789" in text
    assert "| text | int8 | 2545 | 1.5067 | 1.5000 to 1.5100 |" in text
    assert "| +0.0900 (+0.0800 to +0.1000) | **above the spread** |" in text
    assert "| mlp | stock | 1 | 11.2 | 10.0 to 14.0 | - | - | - |" in text
    assert "| mlp | ours | 1 | 11.2 | 10.0 to 14.0 | 11.2 | 11.2 | 0.765 (0.752 to 0.786) |" in text
    assert "Not measured." not in text
    (benchmarks,) = (page for page in others if page.name == "benchmarks.md")
    benchmarks.write_text(benchmarks.read_text().replace("| 0.987 |", "| 0.587 |"))
    assert run(monkeypatch, "--check", *options) == 1


def test_tables_begin_with_the_verdicts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw", lambda *_: None)
    assert run(monkeypatch, "--results", folder) == 0
    text = (folder / "cpu" / report.TABLES).read_text()
    row = (
        "| step | transformer copies, backwards: stock | 0.987 | 0.974 to 1.008 | 1.02 | met | 6 |"
    )
    assert text.index("## Verdicts") < text.index(row) < text.index("## Step")
    assert "Verdicts" not in (folder / "some-gpu" / report.TABLES).read_text()


def test_the_sweep_of_a_gpu_is_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw", lambda *_: None)
    assert run(monkeypatch, "--results", folder) == 0
    text = (folder / "some-gpu" / report.TABLES).read_text()
    assert "| block x warps: share of the copy | MB | 1024 x 4 | 2048 x 8 | best |" in text
    assert "| flatten resnet50 bf16 25MiB | 52.0 | 0.900 | 0.950 | 2048 x 8 |" in text


def test_local_results_are_left_alone_unless_they_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "draw", lambda *_: None)
    pages = readme, *_ = copied_pages(folder)
    local = folder / report.LOCAL
    local.mkdir()
    text = (folder / "cpu" / "step.json").read_text()
    (local / "step.json").write_text(text.replace("0.987", "0.789"))
    (local / report.TABLES).write_text("of another run")
    options = ("--figures", "--results", folder, "--pages", *pages)
    assert run(monkeypatch, *options) == 0
    assert (folder / "cpu" / "step.json").read_text() == text
    assert "0.789" not in "".join(page.read_text() for page in pages)
    assert run(monkeypatch, *options, "--from", report.LOCAL) == 0
    assert f"copied from local: {folder / 'cpu' / 'step.json'}" in capsys.readouterr().out
    assert "backward of a transformer | 0.789 " in readme.read_text()
    text = "".join(page.read_text() for page in pages)
    assert "| transformer | copies | stock | 0.789 |" in text
    assert "| 2 | 1 Gbit/s | copies |" in text  # what is not there stays
    assert (folder / "cpu" / report.TABLES).read_text().startswith("# Measured on: cpu")
    assert (local / report.TABLES).read_text() == "of another run"


def test_nothing_is_taken_from_where_nothing_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"no results in .*local: run make bench"):
        run(monkeypatch, "--figures", "--results", folder, "--from", report.LOCAL)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--check", "--results", folder, "--from", report.LOCAL)


def test_what_has_no_file_is_not_measured() -> None:
    figures = report_tables.figures({})
    assert {tuple(lines) for lines in figures.values()} == {("Not measured.",)}
    only_gpu = report_tables.figures({"some-gpu": RESULTS["some-gpu"]})
    assert only_gpu["step"] == ["Not measured."]
    assert any("share of the copy" in line for line in only_gpu["gpu"])
    assert any("bounds are met" in line for line in only_gpu["headline"])


@pytest.mark.parametrize("names", [("speed",), (), ("step", "step")])
def test_each_figure_has_one_marker(names: tuple[str, ...]) -> None:
    pages = {
        Path(f"{place}.md"): f"<!-- figures: {name} -->\n<!-- end figures -->"
        for place, name in enumerate(names)
    }
    with pytest.raises(ValueError, match="markers for"):
        report.filled(pages, {"step": []})


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "step.json").write_text("{")
    with pytest.raises(ValueError, match=r"step\.json is no result file"):
        report.load(tmp_path)


@pytest.mark.long
def test_plots_are_drawn_and_no_label_lies_over_another(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [bench]")
    import report_plots
    from matplotlib.text import Text

    drawn = dict(report_plots.figures(RESULTS["cpu"]))
    plots = {*RESULTS["cpu"], "overhead", "convergence-text"}
    plots -= {
        "detection",
        "network_hosts",
        "convergence",
        "compiled",
        "compiled_gloo",
    }  # tables only, and a picture a task
    assert set(drawn) == {f"{name}.png" for name in plots}
    for name, figure in drawn.items():
        figure.canvas.draw()
        # Ticks beyond the axis are not drawn, but have labels.
        unseen = {
            tick.label1
            for axes in figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for tick in axis.get_major_ticks()
            if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        }
        hidden = {text for axes in figure.axes if not axes.axison for text in axes.findobj(Text)}
        boxes = [
            (text.get_text(), text.get_window_extent())
            for text in figure.findobj(Text)
            if text.get_visible() and text.get_text() and text not in unseen | hidden
        ]
        for label, box in boxes:
            assert -1 <= box.x0 < box.x1 <= figure.bbox.width + 1, f"{name}: {label!r} is cut"
            assert -1 <= box.y0 < box.y1 <= figure.bbox.height + 1, f"{name}: {label!r} is cut"
        for (label, box), (other, its) in itertools.combinations(boxes, 2):
            assert not box.overlaps(its), f"{name}: {label!r} lies over {other!r}"
        report_plots.save(figure, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# make bench


def outcome_of(code: str, out: Path, seconds: float = 60) -> str:
    part = bench.Part("part", seconds, shlex.join(["-c", code]))
    return bench.run(part, time.monotonic() + seconds, out)


def writing(path: Path, text: str) -> str:
    """Code that writes a file."""
    return f"import pathlib; pathlib.Path({str(path)!r}).write_text({text!r})"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(1)", "ok, "),
        ("raise(SystemExit(2))", "not run: "),
        ("print('no');raise(SystemExit(2))", "not run: no"),
        ("exit(3)", "failed: exit status 3"),
        ("import_time", "failed: exit status 1, see above: NameError"),
    ],
)
def test_a_part_is_ok_not_run_or_failed(code: str, outcome: str, tmp_path: Path) -> None:
    assert outcome_of(code, tmp_path).startswith(outcome)


def test_a_part_knows_its_deadline(tmp_path: Path) -> None:
    code = f"import os, time; t = float(os.environ[{deadline.VARIABLE!r}]) - time.monotonic()"
    assert outcome_of(f"{code}; exit(not 0 < t < 1000)", tmp_path, 1000).startswith("ok, ")


@pytest.mark.long
def test_a_part_that_hangs_is_ended_and_what_it_wrote_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LEAST_SECONDS", 4.0)
    result = tmp_path / "part.json"
    content = {"results": [{"rounds": 3}, {"rounds": 7}]}
    code = f"{writing(result, json.dumps(content))}; import time; time.sleep(60)"
    outcome = outcome_of(code, tmp_path, seconds=0.5)
    assert outcome.startswith("failed: cut off after ")
    assert "3 to 7 rounds" in outcome
    assert json.loads(result.read_text()) == content


@pytest.mark.parametrize("content", ["", '{"models":'])
def test_half_a_result_and_that_of_an_earlier_run_are_removed(tmp_path: Path, content: str) -> None:
    result = tmp_path / "part.json"
    result.write_text("{}")
    assert outcome_of("pass", tmp_path).startswith("ok, ")
    assert not result.exists()
    outcome_of(writing(result, content), tmp_path)
    assert not result.exists()


def test_all_parts_together_are_under_ten_minutes() -> None:
    grace, limit = re.findall(
        r"timeout -k (\d+) (\d+) \S+ benchmarks/bench",
        (bench.HERE.parent / "Makefile").read_text(),
    )[0]
    assert sum(part.seconds for part in bench.PARTS) == bench.SECONDS
    # Between them there is time for parts that take longer than they should.
    assert int(limit) >= bench.SECONDS + bench.LEAST_SECONDS
    assert int(grace) + int(limit) < 600


@pytest.mark.long
def test_make_bench_writes_its_folder_only_and_ends_with_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def committed() -> dict[Path, bytes]:
        files = [*report.PAGES, *sorted((report.RESULTS / "cpu").iterdir())]
        return {path: path.read_bytes() for path in files}

    out = tmp_path / "results" / "local"
    text = json.dumps(RESULTS["cpu"]["step"])
    step = bench.Part("step", 1, shlex.join(["-c", writing(out / "step.json", text)]))
    monkeypatch.setattr(bench, "PARTS", (step, bench.PARTS[-1]))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(out)])
    before = committed()
    assert bench.main() == 0
    assert committed() == before
    assert (out / report.TABLES).read_text().startswith("# Measured on: local")
    printed = capsys.readouterr().out
    assert "transformer copies, backwards: stock" in printed.rsplit("ours against", 1)[1]
    assert f"Written to {out}; the committed results" in printed


def test_no_part_names_what_is_committed() -> None:
    for part in bench.PARTS:
        assert "{out}" in part.command
        assert not re.search(r"results/|--figures|--from", part.command)
    ignored = (report.ROOT / ".gitignore").read_text().splitlines()
    assert f"/{bench.LOCAL.relative_to(report.ROOT)}/" in ignored
