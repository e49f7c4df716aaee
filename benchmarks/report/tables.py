"""Result files as tables: for each machine's folder, for the pages, and for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from statistics import mean, median
from typing import Any

from benchmarks.base.results import Record, Result, Results, interval
from benchmarks.report import verdicts, wires
from benchmarks.report.table import (
    Blocks,
    Cell,
    Rows,
    Table,
    markdown,
    median_ms,
    mib,
    ms,
    number,
    or_dash,
    quartiles,
    ratio,
    three,
)
from benchmarks.report.verdicts import words

_NOT_MEASURED = "Not measured."
CPU = "cpu"
CEILING = "device copy"
Show = Callable[[Result], Blocks]


# One table for each kind of result


def _errors(step: Result) -> Iterator[str]:
    for name, model in step.models.items():
        if model.error:
            yield f"\n{name}: not timed: {model.error}"


def _against(ours: str, again: str) -> tuple[tuple[str, Cell], ...]:
    """Return columns for ours, and for its reference compared with itself."""
    return (
        (ours, lambda one: three(one.ours.median)),
        ("95% interval", lambda one: interval(one.ours)),
        (again, lambda one: three(one.again.median)),
        ("95% interval", lambda one: interval(one.again)),
    )


def _verdict(one: Record) -> str:
    return words(one.verdict, one.model.rounds)


comparisons = Rows(
    lambda step: step.compared,
    (
        ("model", "name"),
        ("gradients", "gradients"),
        ("best stock DDP", "best"),
        *_against("time ratio", "stock / itself"),
        ("bound", lambda one: f"{one.bound_on or ''} {one.bound or ''}".strip()),
        ("verdict", _verdict),
    ),
    _errors,
)


def _of_models(result: Result, key: str) -> Iterator[Record]:
    """Yield each configuration of each model that has ``key``; its value becomes ``found``."""
    for name, model in result.models.items():
        for label, found in (model.get(key) or {}).items():
            yield Record(name=name, label=label, found=found, model=model)


# All timed configurations: medians and quartiles in ms, overhead, bytes and launches.
configurations = Rows(
    partial(_of_models, key="seconds"),
    (
        ("model", "name"),
        ("configuration", "label"),
        ("backward, ms", lambda row: ms(row.found.median)),
        ("quartiles", lambda row: quartiles(row.found)),
        ("step above unwrapped, ms", lambda row: ms(row.model.overhead_seconds.get(row.label))),
        ("on the wire, MB", lambda row: or_dash(row.model.wire_bytes[row.label], _megabytes)),
        ("collectives", lambda row: str(row.model.collectives[row.label])),
        ("launches", lambda row: or_dash(row.model.launches[row.label], str)),
    ),
)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}"


def _gpu_steps(result: Result) -> Iterator[Record]:
    for part, step in result.steps.items():
        if not part.endswith("pair"):  # its ranks took turns on one GPU
            yield from step.compared


def _took(one: Record, name: str | None) -> str:
    return median_ms(one.model.step_seconds.get(name))


# For `make gpu`: whole steps compared with the best stock, in ms; both send.
gpu_steps = Rows(
    _gpu_steps,
    (
        ("step, ms", lambda one: f"{one.name}, {one.gradients}"),
        ("unwrapped", lambda one: _took(one, "unwrapped")),
        ("best stock DDP", lambda one: _took(one, one.best)),
        ("ours", lambda one: _took(one, one.contender)),
        ("ours idle", lambda one: _took(one, one.contender.replace("ours", "ours idle"))),
        (
            "exposed, stock / ours",
            lambda one: " / ".join(
                ms(one.model.exposed_seconds.get(each)) for each in (one.best, one.contender)
            ),
        ),
        ("added time ratio (95% interval)", lambda one: f"{one.overhead:.2f} ({_ends(one)})"),
        ("verdict", _verdict),
        ("stock DDP configuration", "best"),
    ),
)


def _ends(one: Record) -> str:
    return " to ".join(f"{end:.2f}" for end in one.overhead_interval or ())


def _variants(result: Result) -> Iterator[Record]:
    for name, model in result.content.models.items():
        for label, found in model.items() if "error" not in model else ():
            bare = None if label == "unwrapped" else model.unwrapped.step_seconds
            yield Record(found, name=name, label=label, bare=bare)


# Steps by options, in ms: until host and device finish, and in excess of the unwrapped model.
variants = Rows(
    _variants,
    (
        ("model", "name"),
        ("options", "label"),
        ("host, ms", lambda row: ms(row.host_seconds)),
        ("step, ms", lambda row: ms(row.step_seconds)),
        (
            "above unwrapped, ms",
            lambda row: or_dash(row.bare, lambda bare: ms(row.step_seconds - bare)),
        ),
        ("rounds", lambda row: str(len(row.raw))),
    ),
)


def _costs(result: Result, show: Callable[[Any], str]) -> dict[str, dict[str, str]]:
    """Return the host's work in microseconds, by configuration, then by kind and column."""
    cells: dict[str, dict[str, str]] = {}
    for row in result.rows:
        shown = {f"{row.kind}: {column}": show(us) for column, us in row.us.items()}
        cells.setdefault(row.configuration, {}).update(shown)
    return cells


def host(result: Result) -> Blocks:
    """Return medians and quartiles in microseconds."""
    cells = _costs(result, lambda us: f"{number(us.median)} ({quartiles(us, per=1)})")
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [(name, *(row.get(column, "-") for column in columns)) for name, row in cells.items()]
    yield Table(("us, median (quartiles)", *columns), rows)


def _peaks(result: Result) -> Iterator[Record]:
    for name, model in result.content.models.items():
        for label, row in model.items():
            yield Record(row, name=name, label=label, is_ours=label.startswith("ours"))


# Peaks above the unwrapped model in MiB, in the first and in steady steps.
memory = Rows(
    _peaks,
    (
        ("model", "name"),
        ("configuration", "label"),
        ("buckets, MiB", lambda row: mib(row.buckets)),
        ("first steps", lambda row: mib(row.above.first)),
        ("steady", lambda row: mib(row.above.steady)),
        ("within limit", lambda row: ("yes" if row.holds else "**no**") if row.is_ours else ""),
    ),
)

_AGAINST_SPREAD = {
    "within": "within the spread",
    "below": "below the spread",
    "above": "**above the spread**",
    None: "-",
}


def _wires(result: Result) -> Iterator[Record]:
    for name, task in result.content.tasks.items():
        for wire, one in task.comparisons.items():
            yield Record(one, task=name, wire=wire, sent=task.sent_bytes[wire])


def _tasks(result: Result) -> Iterator[str]:
    yield ""
    for name, task in result.content.tasks.items():
        yield (
            f"- {name}: {task.parameters:,} parameters, {task.steps:,} steps of "
            f"{task.batch_size} samples per rank, {task.optimizer}; "
            f"held out {task.held_out_targets:,} {task.target}s. All ranks held the same "
            f"bits after each of {task.same_bits_after_steps:,} steps of each wire."
        )


def _away(one: Record) -> str:
    away = one.differences
    return (
        "-" if one.verdict is None else f"{mean(away):+.4f} ({min(away):+.4f} to {max(away):+.4f})"
    )


# Final held-out losses of each wire compared with fp32, in nats per target.
convergence = Rows(
    _wires,
    (
        ("task", "task"),
        ("wire format", "wire"),
        ("sent per step, kB", lambda one: f"{one.sent / 1e3:.0f}"),
        ("final held-out loss", lambda one: f"{one.mean:.4f}"),
        ("range over the seeds", lambda one: f"{one.low:.4f} to {one.high:.4f}"),
        ("difference from fp32 with the same seed", _away),
        ("mean, compared with the fp32 seeds", lambda one: _AGAINST_SPREAD[one.verdict]),
    ),
    _tasks,
)


def _on_lines(result: Result) -> Iterator[Record]:
    """Yield each comparison on each line, with its ``line``."""
    for line in result.lines:
        for one in line.compared:
            stock, ours = (line.contenders[name] for name in (one.best, one.contender))
            faster = Record(
                median=1 / one.ours.median, low=1 / one.ours.high, high=1 / one.ours.low
            )
            target = _WIRE_TARGETS.get((_hosts(line), line.rate_bits_per_s, one.gradients))
            yield Record(one, line=line, its=stock, own=ours, faster=faster, target=target)


def _hosts(line: Record) -> str:
    of_each = line.ranks_per_host or 1
    return str(line.hosts) if of_each == 1 else f"{line.hosts // of_each} x {of_each}"


# Ours and the best stock, compared with the line's limit.
network = Rows(
    _on_lines,
    (
        ("hosts", lambda one: _hosts(one.line)),
        ("line", lambda one: one.line.rate),
        ("gradients", "gradients"),
        ("least time, ms", lambda one: ms(one.line.limit_seconds)),
        ("ours, ms", lambda one: ms(one.own.seconds.median)),
        ("ours / least time", lambda one: three(one.own.over.limit)),
        ("best stock DDP / least time", lambda one: three(one.its.over.limit)),
        ("ours / best stock DDP", lambda one: three(one.ours.median)),
        ("95% interval", lambda one: interval(one.ours)),
    ),
)

# Speedup over stock in fp32, by hosts, rate and wire.
_WIRE_TARGETS = {
    ("2", 1e9, "bf16"): 1.8,
    ("2", 1e9, "int8"): 2.5,
    ("2 x 2", 2e8, "bf16"): 2.9,
    ("2 x 2", 2e8, "int8"): 4.5,
    ("4", 2e8, "int8"): 3.5,
}


def _target(one: Record) -> str:
    verdict = "met" if one.target is None or one.faster.median >= one.target else "**missed**"
    return or_dash(one.target, lambda target: f"{target:.2f}: {verdict}")


# Steps that send fewer bytes, compared with stock in fp32.
network_wire = Rows(
    _on_lines,
    (
        ("hosts", lambda one: _hosts(one.line)),
        ("line", lambda one: one.line.rate),
        ("wire format", "gradients"),
        ("sent per host, MB", lambda one: f"{one.own.tx_bytes / 1e6:.1f}"),
        ("stock DDP, MB", lambda one: f"{one.its.tx_bytes / 1e6:.1f}"),
        ("stock fp32, ms", lambda one: ms(one.its.seconds.median)),
        ("ours, ms", lambda one: ms(one.own.seconds.median)),
        ("ours / least time", lambda one: three(one.own.over.limit)),
        ("speedup over stock DDP", lambda one: f"{one.faster.median:.2f}"),
        ("95% interval", lambda one: f"{one.faster.low:.2f} to {one.faster.high:.2f}"),
        ("target", _target),
    ),
)


def kernels(result: Result) -> Blocks:
    """Return a table per direction: the share of a plain copy's bandwidth that each contender
    reaches, with a row per group and a column per contender. On a GPU, by the device's time."""
    found: dict[str, dict[str, dict[str, Record]]] = {}
    for row in result.rows:
        label = " ".join(filter(None, (row.numbers, row.parameters, row.dtype, row.bucket)))
        # Until November 2026, it was a median over rounds.
        share = {"of_copy": row.of_ceiling.median} if row.of_ceiling else {}
        group = found.setdefault(row.direction, {}).setdefault(label, {})
        group[row.contender] = Record({**row, **share, **(row.on_device or {})})
    for direction, groups in found.items():
        names = dict.fromkeys(name for group in groups.values() for name in group)
        names.pop(CEILING, None)
        rows = [
            (
                label,
                number(next(iter(group.values())).bytes / 1e6),
                or_dash(group.get(CEILING), lambda copy: number(copy.gb_per_s)),
                *(or_dash(group.get(name), lambda one: three(one.of_copy)) for name in names),
            )
            for label, group in groups.items()
        ]
        yield ""
        yield Table((f"{direction}: share of the copy", "MB", "copy, GB/s", *names), rows)


def _compiled(result: Result) -> Iterator[Record]:
    for name, model in result.content.models.items():
        for label, each in model.contenders.items():
            above, late = model.above_bare.get(label), model.exposed.get(label)
            more = {"above": above, "late": late and late.seconds}
            more["ratio"] = model.ratios.get(f"{label} / stock")
            yield Record(each, name=name, label=label, **more)


# Whole steps under torch.compile compared with stock, in ms; from November 2026.
compiled = Rows(
    _compiled,
    (
        ("model", "name"),
        ("compiled", "label"),
        ("graphs", "graphs"),
        ("step, ms", lambda one: ms(one.seconds.median)),
        ("quartiles", lambda one: quartiles(one.seconds)),
        ("above bare, ms", lambda one: median_ms(one.above)),
        ("exposed, ms", lambda one: median_ms(one.late)),
        ("step / stock (95% interval)", lambda one: or_dash(one.ratio, ratio)),
    ),
)


def gpu_parts(result: Result) -> Blocks:
    """Return the other parts of `make gpu`: other steps, the host's work, memory, kernels."""
    for name, show in _OF_PARTS.items():
        found = result.part(name)
        if found is not None:
            yield ""
            yield from show(found)


# Tables on pages, and training steps on GPUs

# Rows of the host's work, and the names of the parts in the result file of a GPU.
_HOST = ("stock", "stock views", "ours", "ours views")
# Models of a size that people train on a GPU.
_LARGE = ("resnet50", "vit_b16", "gpt2_small", "llama3_8b_layer")
_COSTS = ("parameter: all", "bucket: launch", "step: backward")
_PER = ("parameter", "bucket", "backward")  # their names on a page


def on_one_rank(result: Result) -> Iterator[Record]:
    """Yield the steps of `make gpu` with copies and views, in which both wrappers send."""
    for step in result.steps.values():
        for one in step.compared:
            alone = (step.content.world_size or 1) == 1
            if alone and one.gradients in ("copies", "views"):
                yield one


def of_gpu_steps(result: Result) -> Blocks:
    """Return steps of large models on one rank, with copies, in ms: our overhead as a share of the
    best stock's overhead, and a paired test of both, corrected for the number of comparisons."""
    rows, found = [], list(on_one_rank(result))
    raw: dict[str, Any] = {}
    for step in [*result.steps.values()][::-1]:  # steps in fewer bytes come last
        raw |= step.content.models
    for one in found:
        if one.name not in _LARGE or one.gradients != "copies":
            continue
        names = ("unwrapped", one.best, one.contender)
        low, high = one.overhead_interval or (0, 0)
        bare, again, its, ours = (
            _added_up(raw[one.name], each) for each in ("unwrapped", "unwrapped again", *names[1:])
        )
        pair = verdicts.Paired.of(ours, its, (bare, again), len(found))
        rows.append(
            (
                f"{one.name}, {one.gradients}",
                *(ms(one.model.step_seconds[each].median) for each in names),
                f"{one.overhead:.2f} ({low:.2f} to {high:.2f})",
                *(f"{pair.below} of {pair.rounds}", f"{pair.p:.2g}"),
            )
        )
    header = ("step, ms", "unwrapped", "best stock DDP", "ours", "added time ratio (95% interval)")
    yield Table((*header, "rounds in which ours is faster", f"p x {len(found)} tests"), rows)


def _added_up(model: Mapping[str, Any], name: str) -> verdicts.Builds:
    """Return whole steps of one rank, by build: forward plus backward."""
    parts = (model[f"raw_{part}seconds_per_rank"][0][name] for part in ("forward_", ""))
    return [list(map(add, *build)) for build in zip(*parts, strict=True)]


def training(result: Result) -> Blocks:
    """Return free-running training steps compared with stock, in ms above two bare models' mean."""
    content = result.content
    if content.simulated:
        yield f"SIMULATION of 8 ranks on one card; not in it: {content.simulated}."
    for one in content.calibration or ():
        off = one.seconds / one.formula - 1
        yield f"  line of {one.bus:g} GB/s, {one.bytes >> 20} MiB: off by {off:+.1%}"
    rows = []
    for name, condition, best, ours, pair in verdicts.trained(content.models):
        samples = content.models[name].samples[condition]
        flat = {label: [s for build in each for s in build] for label, each in samples.items()}
        bare = list(map(mean, zip(flat["unwrapped"], flat["unwrapped again"], strict=True)))
        above = [
            ms(median(a - b for a, b in zip(flat[each], bare, strict=True)))
            for each in (best, ours)
        ]
        late = content.models[name].exposed
        rows.append(
            (
                f"{name}, {content.batches[name]} examples" + f", {condition}" * bool(condition),
                *(best, ours, ms(median(bare)), *above),
                " / ".join(ms(late.get(each)) for each in (best, ours)),
                *(f"{pair.below} of {pair.rounds}", f"{pair.p:.2g}", pair.verdict),
            )
        )
    ranks, where = content.world_size, f"{content.precision}, {content.optimizer}"
    header = (
        f"step, {ranks} rank{'s' * (ranks > 1)}, {where}",
        "best stock DDP",
        "ours",
        "bare, ms",
    )
    more = ("stock above", "ours above", "exposed, stock / ours", "ours below", "p", "verdict")
    yield Table((*header, *more), rows)
    yield from (f"{name}: {each.error}" for name, each in content.models.items() if each.error)
    if content.rows:
        yield from bus(result)


# Bandwidth of an all-reduce alone: each GPU transfers 2 (n - 1) / n of its bytes.
bus = Rows(
    lambda result: result.content.rows,
    (
        ("all-reduce, ranks", "ranks"),
        ("MiB", lambda one: f"{one.bytes / 2**20:g}"),
        ("ms", lambda one: ms(one.seconds)),
        ("bus, GB/s", lambda one: number(one.bus)),
    ),
)


def of_host(results: Mapping[str, Result]) -> Blocks:
    """Return medians of the host's work in microseconds, by machine."""
    rows = []
    for machine, result in results.items():
        costs = _costs(result, lambda us: f"{us.median:.1f}")
        for name in filter(costs.__contains__, _HOST):
            rows.append((machine, name, *(costs[name].get(each, "-") for each in _COSTS)))
    yield Table(("device", "configuration", *(f"per {each}, us" for each in _PER)), rows)


def _sharded(results: Results) -> Iterator[Record]:
    for name in ("sharded-adamw", "sharded-line", "sharded-muon"):
        content = results[name].content if name in results else Record(optimizers={})
        for optimizer, found in content.optimizers.items():
            yield Record(found, name=f"{optimizer}, {content.over}")


def _whole(other: str) -> Any:
    def show(found: Record) -> str:
        one = found.ratios[f"whole, sharded / {other}"]
        return or_dash(one, lambda _: f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})")

    return show


# Whole steps with owners, relative to replicated optimizers and to torch's class.
of_sharded = Rows(
    _sharded,
    (
        ("optimizer, hosts", "name"),
        ("step / replicated", _whole("replicated")),
        ("step / stock DDP with torch's class", _whole("torch")),
        (
            "state per rank / replicated",
            lambda one: f"{one.state_nbytes.sharded / one.state_nbytes.replicated:.2f}",
        ),
    ),
)


# Combinations of these tables

# The gains that the README shows, by comparison: the text of each row.
GAINS = {
    "backward, transformer, copies": "2 processes on one host without a GPU: "
    "backward of a transformer",
    "2 hosts, 1 Gbit/s: int8": "",
    "2 x 2 hosts, 200 Mbit/s: int8": "",
    "step, branchy, copies": "each batch uses a quarter of the layers: step with default options, "
    "compared with `find_unused_parameters=True`",
}
_OPTIONS = {"bf16": "`reduce_dtype=torch.bfloat16`", "int8": '`compression="int8"`'}

_OF_PARTS: dict[str, Show] = {
    "step-training": training,
    "step-simulated": training,
    "step-variants": variants,
    "step-compiled": compiled,
    "host": host,
    "memory": memory,
    "kernels": kernels,
}

# Title, plots and tables, by file.
_SECTIONS: dict[str, tuple[str, Sequence[str], Sequence[Show]]] = {
    "step": ("Step", ("step",), (comparisons, configurations)),
    "step_gloo": ("Step, through the process group", (), (comparisons, configurations)),
    "network": ("Slow lines", (), (network,)),
    "network_hosts": ("Slow lines, two ranks per host", (), (network,)),
    "network_wire": ("Fewer bytes on slow lines", (), (network_wire,)),
    "convergence": ("Convergence", (), (convergence,)),
    "convergence_errors": ("Errors of gradients, by wire", (), (wires.errors,)),
    "overlap": (
        "Wires on one host of eight GPUs: a model, not a measurement",
        (),
        (wires.modeled, wires.pays, wires.sizes, wires.against_stock),
    ),
    "memory": ("Peak memory above the unwrapped model", (), (memory,)),
    "host": ("Host cost", (), (host,)),
    "kernels": ("Flatten and unflatten", (), (kernels,)),
    "compiled": ("torch.compile", (), (compiled,)),
    "compiled_gloo": ("torch.compile, through the process group", (), (compiled,)),
    "variants": ("Options, compared in a separate run", (), (variants,)),
    "variants-before": ("The same, with buckets of at least 8 MiB", (), (variants,)),
    "gpu": ("make gpu", (), (gpu_steps, gpu_parts)),  # it draws its own plots
}


def machine_tables(name: str, results: Results) -> Iterator[str]:
    """Yield the lines of a machine's ``tables.md``."""
    command = "python benchmarks/report/report.py"
    yield f"# Measured on: {name}"
    yield from ("", f"Generated by `{command}` from the JSON files in this folder. Do not edit.")
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


def _part(rows: Rows, is_shown: Callable[[Any], bool], *headings: str) -> Rows:
    """Return a table with some of the rows, and with the first column of each heading."""
    columns = [next(each for each in rows.columns if each[0] == heading) for heading in headings]
    return replace(rows, of=lambda result: filter(is_shown, rows.of(result)), columns=columns)


# Tables of CPU results on pages: figure, file, table.
_ON_PAGES: tuple[tuple[str, str, Show], ...] = (
    (
        "step",
        "step",
        _part(
            comparisons,
            lambda _: True,
            *("model", "gradients", "best stock DDP", "time ratio", "95% interval"),
        ),
    ),
    (
        "network_wire",
        "network_wire",
        _part(
            network_wire,
            lambda one: one.gradients in ("bf16", "int8"),
            *("hosts", "line", "wire format", "sent per host, MB", "stock DDP, MB"),
            *("stock fp32, ms", "ours, ms"),
            *("speedup over stock DDP", "95% interval", "target"),
        ),
    ),
    (
        "convergence_errors",
        "convergence_errors",
        _part(
            wires.errors,
            lambda _: True,
            *("wire format", "error of a gradient", "mean over its tensors"),
            *("error of the sum of all steps", "loss compared with fp32", "spread of fp32 seeds"),
        ),
    ),
    ("wires_on_gpus", "overlap", wires.on_page),
    (
        "compiled",
        "compiled",
        _part(
            compiled,
            lambda one: one.label == "ours",
            *("model", "step, ms", "step / stock (95% interval)"),
        ),
    ),
)


def figures(results: Mapping[str, Results]) -> dict[str, list[str]]:
    """Return the text between the pages' markers, by figure name, from all machines' results."""
    on_cpu = results.get(CPU, {})
    found = {
        name: _credited(CPU, file, on_cpu[file], show(on_cpu[file]))
        for name, file, show in _ON_PAGES
        if file in on_cpu
    }
    gpus = [(name, each["gpu"]) for name, each in results.items() if "gpu" in each]
    # The newest one that has measured steps comes last.
    gpus.sort(key=lambda each: (any(on_one_rank(each[1])), each[1].content.machine.date))
    if gpus and any(on_one_rank(gpus[-1][1])):
        name, result = gpus[-1]
        found["gpu"] = _credited(name, "gpu", result, of_gpu_steps(result))
    hosts = {"CPU": on_cpu["host"]} if "host" in on_cpu else {}
    for _, result in gpus[-1:]:
        part = result.part("host")
        hosts |= {result.content.machine.gpu.name: part} if part else {}
    if hosts:
        found["report_host"] = list(markdown(of_host(hosts)))
    if any(each.startswith("sharded-") for each in on_cpu):
        found["report_sharded"] = list(markdown(of_sharded(on_cpu)))
    found["headline"] = list(headline(on_cpu))
    names = [name for name, _, _ in _ON_PAGES]
    names += ["gpu", "report_host", "report_sharded", "headline"]
    return {name: found.get(name) or [_NOT_MEASURED] for name in names}


def _credited(machine: str, benchmark: str, result: Result, blocks: Blocks) -> list[str]:
    return [*markdown(blocks), "", _credit(machine, benchmark, result)]


def headline(on_cpu: Results) -> Iterator[str]:
    """Yield the text of the first page: gains with their conditions, and all losses."""
    ratios = dict(_against_stock(on_cpu))
    shown = [name for name in GAINS if name in ratios]
    shown += [name for name, each in ratios.items() if each.low > 1]
    rows = [(GAINS.get(name) or _on_hosts(name), _gain(ratios[name])) for name in shown]
    if rows:
        yield from markdown(
            [Table(("comparison with stock DDP", "time ratio (95% interval)"), rows)]
        )
        yield ""
    measured = ("step", "network_wire")
    yield from (_credit(CPU, name, on_cpu[name]) for name in measured if name in on_cpu)


def _on_hosts(name: str) -> str:
    """The text of a comparison between hosts."""
    line, _, wire = name.partition(": ")
    line = line.replace("2 x 2 hosts", "2 hosts of 2 processes each")
    return f"{line}: step with {_OPTIONS[wire]}, compared with fp32" if wire else name


def _gain(one: Record) -> str:
    return f"**{ratio(one)}**: slower" if one.low > 1 else ratio(one)


def _against_stock(on_cpu: Results) -> Iterator[tuple[str, Record]]:
    """Yield ratios of times, by measurement."""
    for one in on_cpu["step"].compared if "step" in on_cpu else ():
        what = "step" if one.of == "whole steps" else "backward"
        yield f"{what}, {one.name}, {one.gradients}", one.ours
    for one in _on_lines(on_cpu["network_wire"]) if "network_wire" in on_cpu else ():
        if one.gradients in ("bf16", "int8"):
            yield f"{_hosts(one.line)} hosts, {one.line.rate}: {one.gradients}", one.ours


def _credit(machine: str, benchmark: str, result: Result) -> str:
    return f"(`benchmarks/results/{machine}/{benchmark}.json`: {result.source})"
