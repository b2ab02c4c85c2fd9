"""The record of an engine's run as one page in the terminal, drawn from the plain object ``manager.report()`` gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from halfstep.errors import PolicyError

_BARS = "▁▂▃▄▅▆▇█"
_STATUS = {"prepared": "yellow", "tried": "cyan", "accepted": "green"}


def show_run(record: Mapping[str, Any], console: Console) -> None:
    """Draw the record of a run: what was updated, how it was normalised and scaled, what was measured."""
    console.print(run_page(record), highlight=False)


def run_page(record: Mapping[str, Any]) -> RenderableType:
    """The page, for a console or a live display. Whatever is computed, or was not observed, is marked as such."""
    if not isinstance(record, Mapping) or "status" not in record:
        given = "a record without a status" if isinstance(record, Mapping) else f"a {type(record).__name__}"
        raise PolicyError(f"run_page was given {given}", "run_page(manager.report())")
    status = str(record["status"])
    title = Text.assemble(("halfstep ", "bold"), "· ", (status, f"bold {_STATUS.get(status, 'white')}"))
    if record["accepted"]:
        title.append(f": {record['accepted']['reason']}")
    parts: list[RenderableType] = [_facts(record)]
    curve = _curve(record["updates"])
    if curve is not None:
        parts.append(curve)
    operators = _operators(record["operators"])
    if operators is not None:
        parts.append(operators)
    notes = [Text(f"• {n['message']}" + (f" ({n['count']} times)" if n["count"] > 1 else "")) for n in record["notes"]]
    if notes:
        parts.append(Group(Text("notes", style="bold yellow"), *notes))
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def _facts(record: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in (
        ("updates", _updates(record["counters"])),
        ("batch", _batch(record["batch"])),
        ("supervised", _supervised(record["batch"], record["normalisation"])),
        ("last group", _last_group(record["last_group"])),
        ("precision", _precision(record["precision"])),
        ("loss scale", _scale(record["loss_scale"])),
        ("norm", _norm(record["norm"])),
        ("memory", _memory(record["memory"])),
        ("run", _run(record)),
    ):
        table.add_row(name, text)
    if record.get("preflights"):
        table.add_row("preflight", _preflight(record["preflights"][-1]))
    return table


def _preflight(made: Mapping[str, Any]) -> str:
    when = (
        f"after {made['applied_updates']:,} applied updates" if made["applied_updates"] else "before the first update"
    )
    return f"passed {when}" if made["passed"] else f"failed {when}: {', '.join(made['failed'])}"


def _updates(counters: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{counters[name]:,} {name}" for name in ("applied", "skipped", "empty") if counters[name])
    return f"{counters['attempted']:,} attempted: {counts or 'none'}; {counters['micro_batches']:,} micro-batches"


def _batch(batch: Mapping[str, Any]) -> str:
    replicas = f"D = {batch['D']}" + (f", R = {batch['R']}" if batch["R"] != batch["D"] else "")
    if batch["A"] is None:
        return f"no group yet; {replicas} ({batch['backend']})"
    examples = _examples(batch["examples_per_update"], batch.get("examples_range"))
    if examples is None:
        return f"A = {batch['A']} micro-batches, {replicas}; examples unknown outside groups"
    m = "ragged" if batch["m"] is None else batch["m"]
    ragged = "" if len(batch["group_sizes"]) < 2 else "; groups of " + ", ".join(batch["group_sizes"])
    return f"m = {m}, A = {batch['A']}, {replicas}: {examples}{ragged}"


def _examples(usual: int | None, between: Sequence[int] | None) -> str | None:
    """How many an update has: most of them, and what others have; a record of an earlier layout tells no range."""
    low, high = between or (usual, usual)
    if low is None or high is None:
        return None
    if usual is None:
        return f"ragged, {low:,} to {high:,} examples an update"
    return f"{usual:,} examples an update" + (f" ({low:,} to {high:,})" if low != high else "")


def _supervised(batch: Mapping[str, Any], normalisation: Mapping[str, Any]) -> Text:
    weights = normalisation["weights"]
    sources = weights if isinstance(weights, str) else ", ".join(weights)
    seen = batch["supervised_elements"]
    text = Text(f"{sources}" if seen is None else f"{_number(seen)} elements, {sources}; ")
    if seen is None:
        text.append("; ")
    verdict = str(normalisation["verdict"])
    text.append(verdict, style={"verified": "green", "disagrees": "bold red"}.get(verdict, "yellow"))
    looked, weighed = normalisation["looked_at_contributions"], normalisation["weighed_contributions"]
    if looked:
        text.append(f" ({weighed} of {looked} contributions weighed, at updates 1, 2, 4, 8, …)")
    if normalisation["counted_examples_instead"]:
        text.append(f"; not read: {normalisation['counted_examples_instead']}")
    return text


def _last_group(last: Mapping[str, Any]) -> str:
    if not last["groups"]:
        return "none was short"
    group = last["groups"][-1]
    count = f", {group['examples']} examples" if group["examples"] is not None else ""
    what = f"{group['micro_batches']} of {group['size']} micro-batches{count}"
    ids = "" if group["ids"] is None else f"; ids {_some(group['ids'])}"
    verb = "kept, with its own denominator" if group["kept"] else "dropped"
    return f"{verb}: {what}{ids} ({last['kept']} kept, {last['dropped']} dropped)"


def _precision(precision: Mapping[str, Any]) -> str:
    islands = precision["kept_in_fp32"]
    used = precision["used"] if precision["activated"] else "fp32 (not activated)"
    if "never entered" in precision.get("autocast", ""):
        used += f" ({precision['declared']} declared; {precision['autocast']})"
    kept = f"; kept in FP32: {_some(islands)}" if islands else ""
    parameters = ", ".join(precision["parameters"]) or "not observed"
    return (
        f"{used} on {precision['device']}{kept}; parameters {parameters}; master weights: {precision['master_weights']}"
    )


def _scale(scale: Mapping[str, Any]) -> str:
    if not scale["enabled"]:
        return "none"
    path = [f"{_power(entry['scale'])} ({entry['why']} at {entry['update']})" for entry in scale["path"]]
    shown = path if len(path) <= 7 else [*path[:3], "…", *path[-3:]]
    return f"{_power(scale['now'])} now; " + " → ".join(shown)


def _norm(norm: Mapping[str, Any]) -> str:
    percentiles = norm["percentiles"]
    limit = "not clipped" if norm["max_norm"] is None else f"clipped to {norm['max_norm']:g}"
    if percentiles is None:
        return f"{limit}; not measured yet"
    shown = ", ".join(f"{name} {_number(value)}" for name, value in percentiles.items())
    suggested = norm["suggested_max_norm"]
    hint = "" if suggested is None else f"; {_number(suggested)} would clip one update in ten"
    return f"{limit}; measured {shown}{hint}"


def _memory(memory: Mapping[str, Any]) -> str:
    parts = []
    for device, peak in memory.items():
        size = "unknown" if peak["peak_bytes"] is None else f"{peak['peak_bytes'] / 2**20:,.0f} MiB"
        parts.append(f"{device} {size} peak ({peak['how']})")
    return "; ".join(parts)


def _run(record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "platform")
    position = record["position"]
    where = f"epoch {position['epoch']}, {position['micro_batches']} micro-batches into it"
    return f"{record['wall_seconds']['value']:.1f} s; {versions}; torch seed {record['seeds']['torch']}; {where}"


def _curve(updates: Sequence[Mapping[str, Any]]) -> Table | None:
    """Loss and norm over applied updates, as bars; skipped updates are marked below."""
    if len(updates) < 8:
        return None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for name, key, logarithmic in (("loss", "loss", False), ("norm", "grad_norm", True)):
        values = [u[key] for u in updates if u["outcome"] == "applied" and _is_finite(u[key])]
        if len(values) >= 8:
            table.add_row(name, bars(values, logarithmic=logarithmic), f"{_number(values[0])} → {_number(values[-1])}")
    first, last = updates[0]["attempted_updates"], updates[-1]["attempted_updates"]
    skipped = [u["attempted_updates"] for u in updates if u["outcome"] == "skipped"]
    if skipped:
        table.add_row("skipped", _marks(skipped, first, last), _some([str(n) for n in skipped]))
    return table if table.row_count else None


def bars(values: Sequence[float], *, width: int = 60, logarithmic: bool = False) -> str:
    """Values as a row of at most ``width`` bars, each the mean of its stretch."""
    if logarithmic and min(values) > 0:
        values = [math.log(value) for value in values]
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[min(7, int((mean - low) / span * 8))] for mean in means)


def _marks(numbers: Sequence[int], first: int, last: int, width: int = 60) -> str:
    row = [" "] * width
    for number in numbers:
        row[min(width - 1, (number - first) * width // max(1, last - first))] = "×"
    return "".join(row)


def _operators(operators: Mapping[str, Any]) -> RenderableType | None:
    dtypes = operators["dtypes"]
    head = Text.assemble(("operators ", "bold"), (str(operators["observed"]), "dim"))
    if operators.get("not_observed"):
        head.append(f"; not observed: {operators['not_observed']}", style="yellow")
    if not dtypes:
        return head
    by_dtype: dict[str, list[str]] = {}
    for operator, counts in dtypes.items():
        for dtype, count in counts.items():
            by_dtype.setdefault(dtype, []).append(operator if count == 1 else f"{operator} ×{count}")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="magenta", no_wrap=True)
    table.add_column()
    for dtype, names in sorted(by_dtype.items()):
        table.add_row(dtype, ", ".join(names))
    return Group(head, table)


def _number(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1 else f"{value:.4g}"


def _power(scale: float) -> str:
    """Loss scales are powers of two, and read best as such."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _some(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items[:6])) + (f" and {len(items) - 6} more" if len(items) > 6 else "")
