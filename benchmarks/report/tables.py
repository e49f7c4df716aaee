"""Result files as tables: of each machine's folder, of the pages, and of a benchmark's terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean

from benchmarks.base.results import Comparison, Ratio, Result, Results, Row, read
from benchmarks.report import bounds, excerpts, verdicts
from benchmarks.report.table import Blocks, Table, markdown, mib, ms, number, or_dash, quartiles
from benchmarks.report.verdicts import words

_NOT_MEASURED = "Not measured."
CPU = "cpu"
CEILING = "device copy"


# A table of each kind of result


def comparisons(step: Result, unused: bool | None = None) -> Blocks:
    """Ours against stock's best; with ``unused``, of the models that leave parameters unused only
    (or of the others only)."""
    header = ("model", "gradients", "stock's best", "ours / it", "95% interval")
    rows = [
        (
            name,
            one.gradients,
            one.best,
            *_both(one),
            f"{one.bound_on or ''} {one.bound or ''}".strip(),
            words(one.verdict, model.rounds),
        )
        for name, model, one in step.compared
        if unused is None or (one.of == "whole steps") == unused
    ]
    yield Table((*header, "stock / itself", "95% interval", "bound", "verdict"), rows)
    yield from _errors(step)


def _both(one: Comparison) -> tuple[str, ...]:
    """Ours, and what it is held against against itself."""
    return (
        f"{one.ours.median:.3f}",
        one.ours.interval,
        f"{one.again.median:.3f}",
        one.again.interval,
    )


def _errors(step: Result) -> Iterator[str]:
    for name, model in step.models.items():
        if model.error:
            yield f"\n{name}: not timed: {model.error}"


def configurations(step: Result) -> Blocks:
    """All that was timed: medians and quartiles in ms, overhead, bytes and launches."""
    header = ("model", "configuration", "backward, ms", "quartiles", "step above unwrapped, ms")
    rows = [
        (
            name,
            label,
            ms(spread.median),
            quartiles(spread),
            ms(model.overhead_seconds.get(label)),
            f"{model.wire_bytes[label] / 1e6:.2f}",
            str(model.collectives[label]),
            or_dash(model.launches[label], str),
        )
        for name, model in step.models.items()
        for label, spread in model.seconds.items()
    ]
    yield Table((*header, "on the wire, MB", "collectives", "launches"), rows)


def gpu_steps(result: Result) -> Blocks:
    """Of `make gpu`: whole steps beside stock's best, both of which send, in ms."""
    rows = []
    for step in result.steps.values():
        ranks = step.content.get("world_size", 1)
        for name, model, one in step.compared:
            if one.bound is None:  # ranks took turns on one card
                continue
            ours = one.contender or ""
            idle = model.step_seconds.get(ours.replace("ours", "ours idle"))
            shown = (model.step_seconds.get(each) for each in ("unwrapped", one.best, ours))
            late = (model.exposed_seconds.get(each) for each in (one.best, ours))
            rows.append(
                (
                    f"{name}, {one.gradients}" + f", {ranks} ranks" * (ranks > 1),
                    *(ms(each and each.median) for each in shown),
                    or_dash(idle, lambda spread: ms(spread.median)),
                    " / ".join(map(ms, late)),
                    f"{one.overhead:.2f} ({_interval(one)})",
                    words(one.verdict, model.rounds),
                    one.best,
                )
            )
    if not rows:
        yield "Steps beside stock's, both of which send: not measured."
        return
    header = ("step, ms", "unwrapped", "stock's best", "ours", "ours idle", "exposed, its / ours")
    yield Table((*header, "added / its (95% interval)", "verdict", "which of stock's"), rows)


def _interval(one: Comparison) -> str:
    return " to ".join(f"{end:.2f}" for end in one.overhead_interval or ())


def gpu_configurations(result: Result) -> Blocks:
    """Of `make gpu`: all that took a step, and what it sent."""
    header = ("step", "configuration", "ms", "above unwrapped, ms", "on the wire, MB")
    rows = [
        (
            f"{name}, {part}",
            label,
            ms(spread.median),
            ms(model.overhead_seconds.get(label)),
            "-" if label.startswith("unwrapped") else _sent(model.wire_bytes.get(label, 0)),
            or_dash((model.launches or {}).get(label), str),
            str(model.rounds),
        )
        for part, step in result.steps.items()
        for name, model in step.models.items()
        for label, spread in model.step_seconds.items()
    ]
    yield ""
    yield Table((*header, "launches", "rounds"), rows)


def _sent(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}" if nbytes else "nothing: idle"


def graphs(result: Result) -> Blocks:
    """Steps as they are and replayed, in ms, and what they take above the unwrapped model's."""
    rows, notes = [], []
    for name, model in result.content["models"].items():
        bare = model["seconds"].get("unwrapped")
        sent = model.get("wire_bytes", {})
        for label, ways in model["seconds"].items():
            medians = [ways[way]["median"] for way in ("eager", "replayed")]
            above = ["-"] * 2
            if bare is not None and label != "unwrapped":
                base = [bare[way]["median"] for way in ("eager", "replayed")]
                above = [ms(a - b) for a, b in zip(medians, base, strict=True)]
            shown = or_dash(sent.get(label), lambda nbytes: f"{nbytes / 1e6:.2f}")
            rows.append((name, label, *map(ms, medians), *above, shown, str(model["rounds"])))
        notes += [f"  {label}: not captured: {why}" for label, why in model["errors"].items()]
    header = (
        "CUDA graphs",
        "step, ms",
        "eager",
        "replayed",
        "above unwrapped",
        "above it, replayed",
    )
    yield Table((*header, "on the wire, MB", "rounds"), rows)
    yield from notes


def variants(result: Result) -> Blocks:
    """Steps by options, in ms: when the host is done, the device too, and beyond the unwrapped."""
    rows = []
    for name, model in result.content["models"].items():
        if "error" in model:
            continue
        bare = model["unwrapped"]["step_seconds"]
        for label, found in model.items():
            host, step = found["host_seconds"], found["step_seconds"]
            above = "-" if label == "unwrapped" else ms(step - bare)
            rows.append((name, label, ms(host), ms(step), above, str(len(found["raw"]))))
    yield Table(("options", "ms", "host", "step", "above unwrapped", "rounds"), rows)


def detection(result: Result) -> Blocks:
    """Backwards that ask which parameters they will reach against those that are told, and ours
    against stock that searches."""
    header = ("model", "gradients", "of", "ours against", "ours / it", "95% interval")
    rows = [
        (
            name,
            one.gradients,
            one.of,
            one.best,
            *_both(one),
            or_dash(one.bound, str),
            words(one.verdict, model.rounds),
        )
        for name, model, one in result.compared
    ]
    yield Table((*header, "that / itself", "95% interval", "bound", "verdict"), rows)
    yield from _errors(result)


def exchange(result: Result) -> Blocks:
    """One exchange of a bucket between ranks of one host, in ms, by ranks and size."""
    rows = []
    for row in result.content["rows"]:
        seconds = row["seconds"]
        memory, mpich = seconds["memory"], seconds.get("mpich")
        rows.append(
            (
                str(row["ranks"]),
                f"{row['bytes'] / 1024:g}",
                ms(seconds["gloo"]),
                ms(memory),
                f"{seconds['gloo'] / memory:.2f}",
                ms(mpich),
                "-" if mpich is None else f"{memory / mpich:.2f}",
                f"{seconds['copies'] / memory:.2f}",
            )
        )
    header = ("ranks", "KiB", "gloo, ms", "memory, ms", "gloo / memory", "MPICH, ms")
    yield Table((*header, "memory / MPICH", "share of what memory allows"), rows)


def sizes(result: Result) -> Blocks:
    """What backwards take from their last gradient on, by bucket sizes and line."""
    ways = ("stock's sizes", "NCCL's sizes")
    rows = []
    for model in result.content["models"]:
        counts = [len(model["bucket_bytes"][way]) for way in ways]
        for line in model["lines"]:
            shares = [f"{100 * line['ways'][way]['exposed_share']:.0f} %" for way in ways]
            ratios = [read(Ratio, line[name]) for name in ("exposed", "backward")]
            rows.append(
                (
                    model["model"],
                    "{} to {}".format(*counts),
                    f"{line['exchange']:g}",
                    *shares,
                    *(cell for each in ratios for cell in (f"{each.median:.2f}", each.interval)),
                )
            )
    header = ("model", "buckets", "exchange / backward", *(f"exposed, {way}" for way in ways))
    yield Table(
        (*header, "exposed, ratio", "95% interval", "backward, ratio", "95% interval"), rows
    )


def host(result: Result) -> Blocks:
    """Medians and quartiles in microseconds."""
    cells: dict[str, dict[str, str]] = {}
    for row in result.rows:
        for column, us in row.us.items():
            text = f"{number(us.median)} ({quartiles(us, per=1)})"
            cells.setdefault(row.configuration, {})[f"{row.kind}: {column}"] = text
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [(name, *(row.get(column, "-") for column in columns)) for name, row in cells.items()]
    yield Table(("us, median (quartiles)", *columns), rows)


def memory(result: Result) -> Blocks:
    """Peaks above the unwrapped model in MiB, in the first steps and in steady ones."""
    header = ("model", "configuration", "buckets, MiB", "first steps", "steady", "claim")
    rows = []
    for name, model in result.peaks.items():
        for label, row in model.items():
            claim = ("holds" if row.holds else "**broken**") if label.startswith("ours") else ""
            peaks = (mib(row.above[phase]) for phase in ("first", "steady"))
            rows.append((name, label, mib(row.buckets), *peaks, claim))
    yield Table(header, rows)


_AGAINST_SPREAD = {
    "within": "within the spread",
    "below": "below the spread",
    "above": "**above the spread**",
    None: "-",
}


def convergence(result: Result) -> Blocks:
    """Final held-out losses of each wire against those of fp32, in nats per target."""
    rows, notes = [], []
    for name, task in result.content["tasks"].items():
        for wire, one in task["comparisons"].items():
            away = one["differences"]
            against = f"{mean(away):+.4f} ({min(away):+.4f} to {max(away):+.4f})"
            rows.append(
                (
                    name,
                    wire,
                    f"{task['sent_bytes'][wire] / 1e3:.0f}",
                    f"{one['mean']:.4f}",
                    f"{one['low']:.4f} to {one['high']:.4f}",
                    "-" if one["verdict"] is None else against,
                    _AGAINST_SPREAD[one["verdict"]],
                )
            )
        notes.append(
            f"- {name}: {task['parameters']:,} parameters, {task['steps']:,} steps of "
            f"{task['batch_size']} samples per rank, {task['optimizer']}; "
            f"held out {task['held_out_targets']:,} {task['target']}s. All ranks held the same "
            f"bits after each of {task['same_bits_after_steps']:,} steps of each wire."
        )
    header = ("task", "wire", "sent a step, kB", "final held-out loss", "of the seeds")
    yield Table((*header, "minus fp32's of the same seed", "mean against fp32's seeds"), rows)
    yield from ("", *notes)


def network(result: Result) -> Blocks:
    """Ours and stock's best against the line's limit."""
    header = ("hosts", "line", "gradients", "least time, ms", "ours, ms", "ours / least time")
    rows = []
    for line in result.lines:
        of_each = line.ranks_per_host or 1
        hosts = str(line.hosts) if of_each == 1 else f"{line.hosts // of_each} of {of_each}"
        for one in line.compared:
            ours, best = line.contenders[one.contender or ""], line.contenders[one.best]
            rows.append(
                (
                    hosts,
                    line.rate,
                    one.gradients,
                    ms(line.limit_seconds),
                    ms(ours.seconds.median),
                    *(or_dash(each.over["limit"], "{:.3f}".format) for each in (ours, best)),
                    f"{one.ours.median:.3f}",
                    one.ours.interval,
                )
            )
    more = ("stock's best / least time", "ours / stock's best", "95% interval")
    yield Table((*header, *more), rows)


_LIMITS = {
    "limit": "least time on this line",
    "bucket_limit": "when gradients wait for their buckets",
    "gloo_limit": "on a line as fast as gloo drives it alone",
}


def contenders(result: Result) -> Blocks:
    """All that took a step on each line, beside its limits."""
    for line in result.lines:
        of_each = line.ranks_per_host or 1
        hosts = f"{line.hosts // of_each} hosts" + f" of {of_each} ranks" * (of_each > 1)
        yield (
            f"{hosts}, {line.rate}, {line.model}: {line.parameters / 1e6:.2f} M "
            f"parameters, {line.payload_bytes / 1e6:.1f} MB of gradients, {line.rounds} rounds"
        )
        for name, what in _LIMITS.items():
            parts = line.limit_parts[name]
            yield (
                f"  {what}: {ms(sum(parts.values()))} ms = line {ms(parts['line'])} "
                f"+ nothing to send {ms(parts['compute'])}"
            )
        rows = [
            (
                name,
                ms(one.seconds.median),
                quartiles(one.seconds),
                *(or_dash(over, "{:.3f}".format) for over in one.over.values()),
                f"{one.effective_bits_per_s / 1e6:.0f}",
                f"{one.tx_bytes / line.ring_bytes:.4f}",
            )
            for name, one in line.contenders.items()
        ]
        header = ("step, ms", "median", "quartiles", "/ line", "/ buckets", "/ gloo", "Mbit/s")
        yield Table((*header, "sent / ring"), rows)
        if line.rate_bits_per_s is not None:
            yield (
                f"  line bytes / sent {line.line['framing']:.4f}, dropped "
                f"{sum(line.line['dropped'])}, segments sent again "
                f"{sum(line.line['retransmitted'])}"
            )


# Of issue 6: how many times as fast as stock in fp32, by hosts, rate and wire.
_WIRE_TARGETS = {
    (2, 1e8, "int8"): 3.6,
    (2, 1e9, "bf16"): 1.8,
    (2, 1e9, "int8"): 2.5,
}


def network_wire(result: Result) -> Blocks:
    """Steps that send fewer bytes, against stock in fp32."""
    rows = []
    for line in result.lines:
        for one in line.compared:
            ours, stock = line.contenders[one.contender or ""], line.contenders[one.best]
            faster, low, high = (
                1 / each for each in (one.ours.median, one.ours.high, one.ours.low)
            )
            target = _WIRE_TARGETS.get((line.hosts, line.rate_bits_per_s, one.gradients))
            verdict = "met" if target is None or faster >= target else "**missed**"
            rows.append(
                (
                    str(line.hosts),
                    line.rate,
                    one.gradients,
                    f"{(ours.sent_bytes or 0) / 1e6:.2f}",
                    ms(stock.seconds.median),
                    ms(ours.seconds.median),
                    or_dash(ours.over["limit"], "{:.3f}".format),
                    f"{faster:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    "-" if target is None else f"{target:.2f}: {verdict}",
                )
            )
    header = ("hosts", "line", "wire", "a rank sends, MB", "stock fp32, ms", "ours, ms")
    more = ("ours / least time", "times as fast as stock", "95% interval", "target")
    yield Table((*header, *more), rows)


def growth(result: Result) -> Blocks:
    """Times by parameters, counts by ranks, and how much larger a process is than unwrapped."""
    rows = result.content["rows"]
    bare: dict[tuple[bool, int, int], int] = {}
    times, counts = [], []
    for row in rows:
        is_timed = "step_seconds" in row
        base = bare.setdefault((is_timed, row["parameters"], row["ranks"]), row["grown"])
        if row["name"] == "unwrapped":
            continue
        grown = f"{(row['grown'] - base) / 1e6:.1f}"
        if is_timed:
            keys = ("wrapping_seconds", "step_seconds", "above_seconds")
            shown = (ms(row[key]) for key in keys)
            times.append((f"{row['parameters']:,}", row["name"], *shown, grown))
        else:
            sizes = (f"{row[key] / 1e6:.3f}" for key in ("wire_bytes", "sent_bytes"))
            counts.append((str(row["ranks"]), row["name"], str(row["collectives"]), *sizes, grown))
    header = ("parameters", "configuration", "wrapping, ms", "step, ms", "above unwrapped, ms")
    yield Table((*header, "process, MB more"), times)
    yield ""
    header = ("ranks", "configuration", "collectives", "handed over, MB", "sent, MB")
    yield Table((*header, "process, MB more"), counts)


def kernels(result: Result) -> Blocks:
    """For each direction a table of the share of a plain copy's bandwidth that a contender reaches:
    a line for each group, a column for each contender."""
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in result.rows:
        key = filter(None, (row.direction, row.numbers, row.parameters, row.dtype, row.bucket))
        groups.setdefault(tuple(key), {})[row.contender] = row
    for direction in dict.fromkeys(key[0] for key in groups):
        found = {key: row for key, row in groups.items() if key[0] == direction}
        names = list(dict.fromkeys(name for row in found.values() for name in row))
        names = [name for name in names if name != CEILING]
        rows = [
            (
                " ".join(key[1:]),
                number(next(iter(row.values())).bytes / 1e6),
                or_dash(row.get(CEILING), lambda copy: number(copy.gb_per_s)),
                *(or_dash(row.get(name), _share) for name in names),
            )
            for key, row in found.items()
        ]
        yield ""
        yield Table((f"{direction}: share of the copy", "MB", "copy, GB/s", *names), rows)


def _share(row: Row) -> str:
    return f"{row.of_ceiling.median:.3f}"


def gpu(result: Result) -> Blocks:
    """The bounds, and how they stand by what was measured."""
    rows = []
    for bound in bounds.bounds(result.content["parts"]):
        sign, worst = "≥" if bound["at_least"] else "≤", bound["worst"]
        verdict, met, shown = "not measured", "-", "; ".join(bound["not_run"])
        if worst is not None:
            verdict, met = bound["verdict"], f"{bound['met_by']} of {bound['of']}"
            shown = f"{worst['value']:.3g} ({worst['where']})"
        limit = f"{sign} {bound['limit']:g} {bound['unit']}".strip()
        rows.append((bound["bound"], limit, verdict, met, shown))
    yield Table(("bound", "limit", "verdict", "met by", "worst, or why not"), rows)


def compiled(result: Result) -> Blocks:
    """Whole steps under torch.compile, in ms, beside stock's."""
    rows = []
    for name, model in result.content["models"].items():
        for label, each in model["contenders"].items():
            above, exposed = model["above_bare"].get(label), model["exposed"].get(label)
            spread = each["seconds"]
            ratio = model["ratios"].get(f"{label} / stock")
            rows.append(
                (
                    name,
                    label,
                    str(each["graphs"]),
                    ms(spread["median"]),
                    f"{ms(spread['q1'])} to {ms(spread['q3'])}",
                    ms(above and above["median"]),
                    ms(exposed and exposed["seconds"]["median"]),
                    or_dash(ratio, lambda one: _ratio(Ratio(**one))),
                )
            )
    header = ("model", "compiled", "graphs", "step, ms", "quartiles", "above bare, ms")
    yield Table((*header, "exposed, ms", "step / stock (95% interval)"), rows)


def gpu_parts(result: Result) -> Blocks:
    """Of `make gpu`: what else took steps, the host's work, and memory."""
    for name, show in _OF_PARTS.items():
        found = result.part(name)
        if found is not None:
            yield ""
            yield from show(found)


def gpu_kernels(result: Result) -> Blocks:
    part = result.part("kernels")
    if part is not None:
        yield from kernels(part)


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

Show = Callable[[Result], Blocks]

_OF_PARTS: dict[str, Show] = {
    "step-training": excerpts.training,
    "step-simulated": excerpts.training,
    "step-variants": variants,
    "step-graphs": graphs,
    "step-compiled": compiled,
    "host": host,
    "memory": memory,
}

# By file: title, plots, tables.
_SECTIONS: dict[str, tuple[str, Sequence[str], Sequence[Show]]] = {
    "step": ("Step", ("step",), (comparisons, configurations)),
    "detection": ("Detection of unused parameters", (), (detection,)),
    "exchange": ("Ranks of one host", (), (exchange,)),
    "step_gloo": ("Step, through the process group", (), (comparisons, configurations)),
    "network": ("Slow lines", (), (network,)),
    "network_hosts": ("Slow lines, two ranks a host", (), (network,)),
    "sizes": ("Bucket sizes", (), (sizes,)),
    "network_wire": ("Fewer bytes on slow lines", ("network_wire",), (network_wire,)),
    "convergence": ("Convergence", (), (convergence,)),
    "growth": ("Growth", ("growth",), (growth,)),
    "memory": ("Peak memory above the unwrapped model", (), (memory,)),
    "host": ("Host cost", (), (host,)),
    "kernels": ("Flatten and unflatten", (), (kernels,)),
    "compiled": ("torch.compile", (), (compiled,)),
    "compiled_gloo": ("torch.compile, through the process group", (), (compiled,)),
    "variants": ("Options beside each other, in a run of its own", (), (variants,)),
    "variants-before": ("The same, with buckets of 8 MiB at least", (), (variants,)),
    # (It draws its own plots.)
    "gpu": ("make gpu", (), (gpu_steps, gpu, gpu_parts, gpu_configurations, gpu_kernels)),
}


def machine_tables(name: str, results: Results) -> Iterator[str]:
    """``tables.md`` of a machine."""
    command = "python benchmarks/report/report.py"
    yield f"# Measured on: {name}"
    yield from ("", f"Written by `{command}` from the JSON files beside it; do not edit.")
    judged = list(verdicts.rows(results))
    if judged:
        yield from ("", "## Verdicts", "", *markdown([Table(verdicts.HEADER, judged)]))
    for benchmark, (title, plots, tables) in _SECTIONS.items():
        if benchmark in results:
            yield from ("", f"## {title}", "", results[benchmark].source)
            for table in tables:
                yield ""
                yield from markdown(table(results[benchmark]))
            for plot in plots:
                yield from ("", f"![{title}: {plot}]({plot}.png)")


# The rows that pages show, of tables that are whole in ``tables.md``: a column, and its cells.
_ON_PAGES: dict[str, tuple[Show, str, Sequence[str]]] = {
    "exchange": (exchange, "ranks", ("2",)),
    "network_wire": (network_wire, "wire", ("fp32", "bf16", "int8")),
    "convergence": (convergence, "task", ("opposed",)),
    "compiled": (compiled, "compiled", ("stock", "ours")),
}


def _excerpt(name: str, result: Result) -> Blocks:
    show, column, cells = _ON_PAGES[name]
    for block in show(result):
        if isinstance(block, Table):
            place = block.header.index(column)
            yield Table(block.header, [row for row in block.rows if row[place] in cells])


def figures(results: Mapping[str, Results]) -> dict[str, list[str]]:
    """What stands between the pages' markers, by name of the figure, from all machines' results."""
    on_cpu = results.get(CPU, {})

    def of(benchmark: str, table: Show) -> list[str]:
        if benchmark not in on_cpu:
            return [_NOT_MEASURED]
        result = on_cpu[benchmark]
        return [*markdown(table(result)), "", _credit(CPU, benchmark, result)]

    gpus = [(name, each["gpu"]) for name, each in results.items() if "gpu" in each]
    # The newest that has measured steps comes last.
    gpus.sort(
        key=lambda each: (
            any(excerpts.on_one_rank(each[1])),
            str(each[1].content["machine"]["date"]),
        )
    )
    on_gpu = [_NOT_MEASURED]
    if gpus and any(excerpts.on_one_rank(gpus[-1][1])):
        name, result = gpus[-1]  # the newest
        blocks = excerpts.of_gpu_steps(result)
        on_gpu = [*markdown(blocks), "", _credit(name, "gpu", result)]
    return {
        "headline": list(headline(on_cpu)) or [_NOT_MEASURED],
        "step": of("step", lambda result: comparisons(result, unused=False)),
        "branchy": of("step", lambda result: comparisons(result, unused=True)),
        **{name: of(name, partial(_excerpt, name)) for name in _ON_PAGES},
        "gpu": on_gpu,
        **_of_report(results, gpus),
    }


def _of_report(
    results: Mapping[str, Results], gpus: Sequence[tuple[str, Result]]
) -> dict[str, list[str]]:
    """The figures of docs/report.md."""
    on_cpu = results.get(CPU, {})
    found: dict[str, list[str]] = {}
    found["report_growth"] = [_NOT_MEASURED]
    if "growth" in on_cpu:
        shown = markdown(excerpts.of_growth(growth(on_cpu["growth"])))
        found["report_growth"] = [*shown, "", _credit(CPU, "growth", on_cpu["growth"])]
    hosts = {"CPU": on_cpu["host"]} if "host" in on_cpu else {}
    for _, result in gpus[-1:]:
        host_ = result.part("host")
        hosts |= {result.content["machine"]["gpu"]["name"]: host_} if host_ else {}
    found["report_host"] = list(markdown(excerpts.of_host(hosts))) if hosts else [_NOT_MEASURED]
    sharded = any(each.startswith("sharded-") for each in on_cpu)
    shown = markdown(excerpts.of_sharded(on_cpu))
    found["report_sharded"] = list(shown) if sharded else [_NOT_MEASURED]
    return found


def headline(on_cpu: Results) -> Iterator[str]:
    """What the first page shows: gains with their conditions, and all that was lost."""
    ratios = dict(_against_stock(on_cpu))
    rows = [(text, _gain(ratios[name])) for name, text in GAINS.items() if name in ratios]
    rows += [(name, _gain(each)) for name, each in ratios.items() if each.low > 1]
    if rows:
        yield from markdown([Table(("time, ours / stock's best (95% interval)", ""), rows)])
        yield ""
    measured = ("step", "network_wire")
    yield from (_credit(CPU, name, on_cpu[name]) for name in measured if name in on_cpu)


def _ratio(one: Ratio) -> str:
    return f"{one.median:.3f} ({one.interval})"


def _gain(one: Ratio) -> str:
    return f"**{_ratio(one)}**: slower" if one.low > 1 else _ratio(one)


def _against_stock(on_cpu: Results) -> Iterator[tuple[str, Ratio]]:
    """Ratios of times, by what was timed."""
    for name, _, one in on_cpu["step"].compared if "step" in on_cpu else ():
        what = "step" if one.of == "whole steps" else "backward"
        yield f"{what}, {name}, {one.gradients}", one.ours
    for line in on_cpu["network_wire"].lines if "network_wire" in on_cpu else ():
        for one in line.compared:
            if one.gradients in ("bf16", "int8"):
                where = f"step, {line.hosts} hosts, {line.rate}"
                yield f"{where}: {one.gradients} to stock's fp32", one.ours


def _credit(machine: str, benchmark: str, result: Result) -> str:
    return f"(`benchmarks/results/{machine}/{benchmark}.json`: {result.source})"
