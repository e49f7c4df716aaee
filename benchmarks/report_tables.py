"""Result files as Markdown: the tables of each machine, and the figures of the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import convergence_table
import gpu_table
import verdicts
from verdicts import interval, rate, rounds_of, words

# Of a machine's folder, by file name without ending.
Results = Mapping[str, Any]

_NOT_MEASURED = "Not measured."
CPU = "cpu"


def source(content: Mapping[str, Any]) -> str:
    """Where a result comes from, in a line: machine, versions, commit, date, load."""
    facts = content["machine"]
    tree = facts["tritonddp"]
    commit = (tree["commit"] or "no git")[:10] + (" with changes" if tree["dirty"] else "")
    device = (
        facts["gpu"]["name"] if facts["gpu"] else f"{facts['cpu']}, {facts['usable_cores']} cores"
    )
    return (
        f"{device}, torch {facts['torch']}, tritonddp {commit}, {facts['date'][:10]}, "
        f"load average {facts['load_average'][0]:.1f} at the start"
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "| --- |" + " ---: |" * (len(header) - 1)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


# Tables: from a benchmark's content to lines


def comparisons(step: Any, unused: bool | None = None) -> Iterator[str]:
    """Ours against stock's best; with ``unused``, of the models that leave parameters unused only
    (or of the others only)."""
    header = ("model", "gradients", "stock's best", "ours / it", "95% interval")
    rows, errors = [], []
    for name, model in step["models"].items():
        if "error" in model:
            errors.append(f"\n{name}: not timed: {model['error']}")
            continue
        for family, one in model["comparisons"].items():
            if unused is not None and (one["of"] == "whole steps") != unused:
                continue
            rows.append(
                (
                    name,
                    family,
                    one["best"],
                    f"{one['ours']['median']:.3f}",
                    interval(one["ours"]),
                    f"{one['again']['median']:.3f}",
                    interval(one["again"]),
                    f"{one['bound_on'] or ''} {one['bound'] or ''}".strip(),
                    words(one["verdict"], rounds_of(model)),
                )
            )
    yield from markdown((*header, "stock / itself", "95% interval", "bound", "verdict"), rows)
    yield from errors


def configurations(step: Any) -> Iterator[str]:
    """All that was timed: medians and quartiles in ms, overhead, bytes and launches."""
    header = ("model", "configuration", "backward, ms", "quartiles", "step above unwrapped, ms")
    rows = [
        (
            name,
            label,
            number(spread["median"] * 1e3),
            f"{number(spread['q1'] * 1e3)} to {number(spread['q3'] * 1e3)}",
            _or_dash(model["overhead_seconds"].get(label), lambda seconds: number(seconds * 1e3)),
            f"{model['wire_bytes'][label] / 1e6:.2f}",
            str(model["collectives"][label]),
            _or_dash(model["launches"][label], str),
        )
        for name, model in step["models"].items()
        for label, spread in model.get("seconds", {}).items()
    ]
    yield from markdown((*header, "on the wire, MB", "collectives", "launches"), rows)


def detection(content: Any) -> Iterator[str]:
    """Backwards that ask which parameters they will reach against those that are told, and ours
    against stock that searches."""
    header = ("model", "gradients", "of", "ours against", "ours / it", "95% interval")
    rows, errors = [], []
    for name, model in content["models"].items():
        if "error" in model:
            errors.append(f"\n{name}: not timed: {model['error']}")
            continue
        rows += [
            (
                name,
                one["gradients"],
                one["of"],
                one["best"],
                f"{one['ours']['median']:.3f}",
                interval(one["ours"]),
                f"{one['again']['median']:.3f}",
                interval(one["again"]),
                _or_dash(one["bound"], str),
                words(one["verdict"], rounds_of(model)),
            )
            for one in model["comparisons"]
        ]
    yield from markdown((*header, "that / itself", "95% interval", "bound", "verdict"), rows)
    yield from errors


def detection_parts(content: Any) -> Iterator[str]:
    """What detection is made of, on rank 0, in microseconds and bytes of a backward."""
    header = ("model", "gradients", "query, us", "flags written, us", "flags read, us")
    rows = [
        (
            name,
            mode,
            *(
                _or_dash(part[key], lambda seconds: number(seconds * 1e6))
                for key in ("query", "write_flags", "read_flags")
            ),
            number(model["seconds"][part["of"]]["median"] * 1e6),
            f"{part['flag_bytes']} of {part['wire_bytes']}",
        )
        for name, model in content["models"].items()
        for mode, part in model.get("parts", {}).items()
    ]
    yield from markdown((*header, "backward that is told, us", "bytes of flags"), rows)


def exchange(content: Any) -> Iterator[str]:
    """One exchange of a bucket between ranks of one host, in ms, by ranks and size."""
    rows = []
    for row in content["rows"]:
        seconds = row["seconds"]
        memory, mpich = seconds["memory"], seconds.get("mpich")
        rows.append(
            (
                *(str(row["ranks"]), f"{row['bytes'] / 1024:g}"),
                *(number(seconds[name] * 1e3) for name in ("gloo", "memory")),
                f"{seconds['gloo'] / memory:.2f}",
                _or_dash(mpich, lambda each: number(each * 1e3)),
                _or_dash(mpich, lambda each: f"{memory / each:.2f}"),  # noqa: B023  called here
                f"{seconds['copies'] / memory:.2f}",
            )
        )
    header = ("ranks", "KiB", "gloo, ms", "memory, ms", "gloo / memory", "MPICH, ms")
    yield from markdown((*header, "memory / MPICH", "share of what memory allows"), rows)


def host(content: Any, chosen: Sequence[str] | None = None) -> Iterator[str]:
    """Medians and quartiles in microseconds, of the ``chosen`` configurations or of all."""
    cells: dict[str, dict[str, str]] = {}
    for row in content["benchmarks"]:
        info = row["extra_info"]
        for column, us in info["us"].items():
            text = f"{number(us['median'])} ({number(us['q1'])} to {number(us['q3'])})"
            cells.setdefault(info["configuration"], {})[f"{info['kind']}: {column}"] = text
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    yield from markdown(
        ("us, median (quartiles)", *columns),
        (
            (name, *(row.get(column, "-") for column in columns))
            for name, row in cells.items()
            if chosen is None or name in chosen
        ),
    )


def memory(content: Any) -> Iterator[str]:
    """Peaks above the unwrapped model in MiB, in the first steps and in steady ones."""
    header = ("model", "configuration", "buckets, MiB", "first steps", "steady", "claim")
    rows = []
    for name, model in content["models"].items():
        for label, row in model.items():
            claim = ("holds" if row["holds"] else "**broken**") if label.startswith("ours") else ""
            rows.append((name, label, _mib(row["buckets"]), *_peaks(row), claim))
    yield from markdown(header, rows)


def steady_memory(content: Any) -> Iterator[str]:
    """The same in short: stock's default and ours in steady steps, and whether the claim holds."""
    rows, claims = [], []
    for name, model in content["models"].items():
        views = {label: row for label, row in model.items() if label.endswith("views")}
        copies = {label: row for label, row in model.items() if label not in views}
        cells = []
        for family in (copies, views):
            for whose in ("stock", "ours"):  # the first of stock's is its default
                first = next(
                    (row for label, row in family.items() if label.startswith(whose)), None
                )
                cells.append("-" if first is None else _peaks(first)[1])
        claims += [row["holds"] for label, row in model.items() if label.startswith("ours")]
        buckets = next((row["buckets"] for label, row in model.items() if label == "ours"), 0)
        rows.append((name, _mib(buckets), *cells))
    header = ("MiB", "buckets", "stock", "ours", "stock views", "ours views")
    yield from markdown(header, rows)
    yield ""
    yield (
        "Of steady steps. That ours take no more than the buckets and one bucket of gradients in "
        f"any step, the first ones too, holds in {sum(claims)} of {len(claims)} cases."
    )


def _peaks(row: Mapping[str, Any]) -> tuple[str, str]:
    return _mib(row["above"]["first"]), _mib(row["above"]["steady"])


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def convergence(content: Any) -> Iterator[str]:
    """Final held-out losses of each wire against those of fp32."""
    yield from markdown(convergence_table.HEADER, convergence_table.rows(content["tasks"]))
    yield ""
    yield from (f"- {note}" for note in convergence_table.notes(content["tasks"]))


def _hosts(result: Any) -> str:
    of_each = result.get("ranks_per_host", 1)
    return str(result["hosts"]) if of_each == 1 else f"{result['hosts'] // of_each} of {of_each}"


def network(content: Any) -> Iterator[str]:
    """Ours and stock's best against the line's limit."""
    header = ("hosts", "line", "gradients", "least time, ms", "ours, ms", "ours / least time")
    rows = []
    for result in content["results"]:
        for family, one in result["comparisons"].items():
            ours = result["contenders"][one["contender"]]
            best = result["contenders"][one["best"]]
            rows.append(
                (
                    _hosts(result),
                    rate(result["rate_bits_per_s"]),
                    family,
                    number(result["limit_seconds"] * 1e3),
                    number(ours["seconds"]["median"] * 1e3),
                    *(_or_dash(each["over"]["limit"], "{:.3f}".format) for each in (ours, best)),
                    f"{one['ours']['median']:.3f}",
                    interval(one["ours"]),
                )
            )
    yield from markdown(
        (*header, "stock's best / least time", "ours / stock's best", "95% interval"), rows
    )


# Of issue 6: how many times as fast as stock in fp32, by hosts, rate and wire.
_WIRE_TARGETS = {
    (2, 1e8, "int8"): 3.6,
    (2, 1e9, "bf16"): 1.8,
    (2, 1e9, "int8"): 2.5,
    (2, None, "auto"): 1 / 1.02,
}


def network_wire(content: Any) -> Iterator[str]:
    """Steps that send fewer bytes, against stock in fp32."""
    rows = []
    for result in content["results"]:
        for wire, one in result["comparisons"].items():
            ours = result["contenders"][one["contender"]]
            stock = result["contenders"][one["best"]]
            faster, low, high = (1 / one["ours"][key] for key in ("median", "high", "low"))
            target = _WIRE_TARGETS.get((result["hosts"], result["rate_bits_per_s"], wire))
            verdict = "met" if target is None or faster >= target else "**missed**"
            rows.append(
                (
                    str(result["hosts"]),
                    rate(result["rate_bits_per_s"]),
                    wire,
                    f"{ours['sent_bytes'] / 1e6:.2f}",
                    *(number(each["seconds"]["median"] * 1e3) for each in (stock, ours)),
                    _or_dash(ours["over"]["limit"], "{:.3f}".format),
                    f"{faster:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    "-" if target is None else f"{target:.2f}: {verdict}",
                )
            )
    yield from markdown(
        (
            *("hosts", "line", "wire", "a rank sends, MB", "stock fp32, ms", "ours, ms"),
            *("ours / least time", "times as fast as stock", "95% interval", "target"),
        ),
        rows,
    )


def scale(content: Any) -> Iterator[str]:
    """What the cost model predicts of measured steps, and of hosts that nobody has."""
    yield from markdown(
        ("hosts", "line", "what", "measured, ms", "predicted, ms", "off by"),
        (
            (
                str(each["hosts"]),
                rate(each["rate_bits_per_s"]),
                each["contender"],
                *(number(each[f"{which}_seconds"] * 1e3) for which in ("measured", "predicted")),
                f"{each['error']:+.1%}",
            )
            for each in content["checked"]
        ),
    )
    worst = max((abs(each["error"]) for each in content["checked"]), default=0.0)
    verdict = "met" if worst <= content["tolerance"] else "**missed**"
    yield f"\nThe largest error is {worst:.1%}, {content['tolerance']:.0%} allowed: {verdict}.\n"
    curves = content["curves"]
    yield (
        f"Predicted ms a step on lines of {rate(curves['rate_bits_per_s'])}, "
        f"{content['latency_seconds'] * 1e6:g} us a message, algorithms of {content['library']}:\n"
    )
    yield from markdown(
        ("hosts", *curves["seconds"]),
        (
            (str(hosts), *(number(seconds[place] * 1e3) for seconds in curves["seconds"].values()))
            for place, hosts in enumerate(curves["hosts"])
        ),
    )


def kernels(content: Any) -> Iterator[str]:
    """Bandwidths, and the share of a plain copy's that each contender reaches."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in content["benchmarks"]:
        info = row["extra_info"]
        key = (info["direction"], info["parameters"], info["dtype"], info["bucket"])
        groups.setdefault(key, {})[info["contender"]] = info
    for direction in dict.fromkeys(key[0] for key in groups):
        rows = {key: row for key, row in groups.items() if key[0] == direction}
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        yield ""
        yield from markdown(
            (
                f"{direction}: share of the copy",
                "MB",
                "copy, GB/s",
                *(n for n in names if n != gpu_table.CEILING),
            ),
            (
                (
                    " ".join(key[1:]),
                    number(next(iter(row.values()))["bytes"] / 1e6),
                    _or_dash(row.get(gpu_table.CEILING), lambda info: number(info["gb_per_s"])),
                    *(
                        _or_dash(row.get(name), lambda info: f"{info['of_ceiling']['median']:.3f}")
                        for name in names
                        if name != gpu_table.CEILING
                    ),
                )
                for key, row in rows.items()
            ),
        )


def gpu(content: Any) -> Iterator[str]:
    """The bounds, and how they stand."""
    rows = []
    for bound in content["bounds"]:
        sign, worst = "≥" if bound["at_least"] else "≤", bound["worst"]
        rows.append(
            (
                bound["bound"],
                f"{sign} {bound['limit']:g} {bound['unit']}".strip(),
                bound["verdict"],
                f"{bound['met_by']} of {bound['of']}",
                f"{worst['value']:.3g} ({worst['where']})"
                if worst
                else "; ".join(bound["not_run"]),
            )
        )
    yield from markdown(("bound", "limit", "verdict", "met by", "worst, or why not"), rows)


def compiled(content: Any) -> Iterator[str]:
    """Whole steps under torch.compile, in ms, beside stock's."""
    rows = []
    for name, model in content["models"].items():
        for label, each in model["contenders"].items():
            spread, ratio = each["seconds"], model["ratios"].get(f"{label} / stock")
            above, exposed = model["above_bare"].get(label), model["exposed"].get(label)
            rows.append(
                (
                    name,
                    label,
                    str(each["graphs"]),
                    number(spread["median"] * 1e3),
                    f"{number(spread['q1'] * 1e3)} to {number(spread['q3'] * 1e3)}",
                    _or_dash(above, lambda seconds: number(seconds["median"] * 1e3)),
                    _or_dash(exposed, lambda one: number(one["seconds"]["median"] * 1e3)),
                    _or_dash(ratio, lambda one: f"{one['median']:.3f} ({interval(one)})"),
                )
            )
    header = ("model", "compiled", "graphs", "step, ms", "quartiles", "above bare, ms")
    yield from markdown((*header, "exposed, ms", "step / stock (95% interval)"), rows)


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _gpu_kernels(content: Any) -> Iterator[str]:
    parts = content["parts"]
    for name, table in (("kernels", kernels), ("sweep", _sweep)):
        result = (parts.get(name) or {}).get("result")
        if result is not None:
            yield from table(result)


def _sweep(content: Any) -> Iterator[str]:
    """Blocks and warps of flatten and unflatten, as shares of the copy, and the best for each."""
    names = list(content["rows"][0]["choices"])  # the file is written after the first
    rows = []
    for row in content["rows"]:
        shares = [f"{row['choices'][name]['of_ceiling']['median']:.3f}" for name in names]
        bucket = " ".join(row[key] for key in ("direction", "parameters", "dtype", "bucket"))
        rows.append((bucket, number(row["bytes"] / 1e6), *shares, row["best"]))
    yield ""
    yield from markdown(("block x warps: share of the copy", "MB", *names, "best"), rows)


# What is made of them

# Of the first page, by what was timed: each with its conditions.
GAINS = {
    "backward, transformer, copies": "2 processes on one host without a GPU: "
    "backward of a transformer",
    "step, 2 hosts, 1 Gbit/s: int8 to stock's fp32": "2 hosts, 1 Gbit/s: "
    'step with `compression="int8"`, beside stock in fp32',
    "step, branchy, copies": "a batch uses a quarter of the layers: "
    "step with nothing to set, beside stock's `find_unused_parameters`",
}

Table = Callable[[Any], Iterator[str]]

# By file: title, plots, tables.
_SECTIONS: dict[str, tuple[str, Sequence[str], Sequence[Table]]] = {
    "step": ("Step", ("step", "overhead"), (comparisons, configurations)),
    "detection": (
        "Detection of unused parameters",
        (),
        (detection, detection_parts),
    ),
    "network": ("Slow lines", ("network",), (network,)),
    "network_wire": ("Fewer bytes on slow lines", ("network_wire",), (network_wire,)),
    "convergence": (
        "Convergence",
        [f"convergence-{name}" for name in ("text", "digits", "opposed")],
        (convergence,),
    ),
    "scale": ("Where fewer bytes pay", ("scale",), (scale,)),
    "memory": ("Peak memory above the unwrapped model", ("memory",), (memory,)),
    "host": ("Host cost", ("host",), (host,)),
    "kernels": ("Flatten and unflatten", ("kernels",), (kernels,)),
    "compiled": ("torch.compile", (), (compiled,)),
    "compiled_gloo": ("torch.compile, through the process group", (), (compiled,)),
    "gpu": ("make gpu", (), (gpu, _gpu_kernels)),  # it draws its own plots
}


def machine_tables(name: str, results: Results) -> Iterator[str]:
    """``tables.md`` of a machine."""
    yield f"# Measured on: {name}"
    yield ""
    yield "Written by `python benchmarks/report.py` from the JSON files beside it; do not edit."
    judged = list(verdicts.rows(results))
    if judged:
        yield from ("", "## Verdicts", "", *markdown(verdicts.HEADER, judged))
    for benchmark, (title, plots, tables) in _SECTIONS.items():
        if benchmark in results:
            yield from ("", f"## {title}", "", source(results[benchmark]))
            for table in tables:
                yield ""
                yield from table(results[benchmark])
            for plot in plots:
                yield from ("", f"![{title}: {plot}]({plot}.png)")


def figures(results: Mapping[str, Results]) -> dict[str, list[str]]:
    """What stands between the pages' markers, by name of the figure, from all machines' results."""
    on_cpu = results.get(CPU, {})

    def of(benchmark: str, table: Table) -> list[str]:
        if benchmark not in on_cpu:
            return [_NOT_MEASURED]
        content = on_cpu[benchmark]
        return [*table(content), "", _credit(CPU, benchmark, content)]

    gpus = [(name, each["gpu"]) for name, each in results.items() if "gpu" in each]
    on_gpus: list[str] = []
    for name, content in gpus:
        on_gpus += ["", *gpu(content), *_gpu_kernels(content), "", _credit(name, "gpu", content)]
    return {
        "headline": list(headline(on_cpu, gpus)) or [_NOT_MEASURED],
        "step": of("step", lambda content: comparisons(content, unused=False)),
        "branchy": of("step", lambda content: comparisons(content, unused=True)),
        "detection": of("detection", detection),
        "exchange": of("exchange", exchange),
        "host": of("host", lambda content: host(content, ("stock", "stock batched", "ours"))),
        "memory": of("memory", steady_memory),
        "network": of("network", network),
        "network_hosts": of("network_hosts", network),
        "network_wire": of("network_wire", network_wire),
        "convergence": of("convergence", convergence),
        "compiled": of("compiled", compiled),
        "compiled_gloo": of("compiled_gloo", compiled),
        "gpu": on_gpus[1:] or [_NOT_MEASURED],
    }


def headline(on_cpu: Results, gpus: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """What the first page shows: gains with their conditions, and all that was lost or missed."""
    ratios = dict(_against_stock(on_cpu))
    rows = [(text, _ratio(ratios[name])) for name, text in GAINS.items() if name in ratios]
    rows += [(name, _ratio(one)) for name, one in ratios.items() if _is_slower(one)]
    if rows:
        yield from markdown(("time, ours / stock's best (95% interval)", ""), rows)
        yield ""
        measured = ("step", "network_wire")
        yield from (_credit(CPU, name, on_cpu[name]) for name in measured if name in on_cpu)
    for name, content in gpus:
        missed = [bound for bound in content["bounds"] if bound["verdict"] != "met"]
        met = len(content["bounds"]) - len(missed)
        yield from ("", f"On one GPU {met} of {met + len(missed)} bounds are met. The others:", "")
        yield from (*gpu({"bounds": missed}), "", _credit(name, "gpu", content))


def _is_slower(one: Mapping[str, Any]) -> bool:
    return one["low"] > 1


def _ratio(one: Mapping[str, Any]) -> str:
    text = f"{one['median']:.3f} ({interval(one)})"
    return f"**{text}**: slower" if _is_slower(one) else text


def _against_stock(on_cpu: Results) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Ratios of times, by what was timed."""
    for name, model in on_cpu.get("step", {"models": {}})["models"].items():
        for gradients, one in model.get("comparisons", {}).items():
            what = "step" if one["of"] == "whole steps" else "backward"
            yield f"{what}, {name}, {gradients}", one["ours"]
    for result in on_cpu.get("network_wire", {"results": []})["results"]:
        line = f"step, {result['hosts']} hosts, {rate(result['rate_bits_per_s'])}"
        for wire in ("bf16", "int8"):
            if wire in result["comparisons"]:
                yield f"{line}: {wire} to stock's fp32", result["comparisons"][wire]["ours"]


def _credit(machine: str, benchmark: str, content: Any) -> str:
    return f"(`benchmarks/results/{machine}/{benchmark}.json`: {source(content)})"
