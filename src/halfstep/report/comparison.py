"""Two runs side by side in the terminal, drawn from the plain document of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.report.terminal import print_line

BLAME = {
    "precision": ("precision is to blame", "bold red"),
    "not precision": ("precision is not to blame", "bold green"),
    "unknown": ("it cannot be said", "bold yellow"),
}
NAMES = {"own": "as it is", "fp32": "in FP32", "scaled": "in FP32, scaler on", "jittered": "in FP32, random errors"}
_ROWS = 12
_LAYERS = 6


def show_comparison(doc: Mapping[str, Any], console: Console) -> None:
    """The verdict, the criterion, where the runs part, then updates and layers side by side."""
    words, style = BLAME[doc["verdict"]["blame"]]
    print_line(console, Text.assemble(("halfstep compare", "bold"), " · ", (words, style)))
    print_line(console, Text(doc["verdict"]["words"]))
    for line in lines(doc):
        print_line(console, Text(line))
    if doc["updates"]:
        console.print()
        console.print(_updates(doc))
    for layers in named_layers(doc):
        console.print()
        console.print(_layers(doc, layers))
    for side, run in doc["runs"].items():
        if run["output"]:
            console.print()
            print_line(console, Text(f"the end of what the run {NAMES[side]} printed:", style="dim"))
            print_line(console, Text("\n".join(run["output"].rstrip().splitlines()[-8:])))


def lines(doc: Mapping[str, Any]) -> list[str]:
    """What is said beside the verdict, a line each."""
    out = []
    criterion, parted = doc["criterion"], doc["parted"]
    if "own" in criterion:
        metric = criterion["metric"].replace("grad_norm", "gradient norm") + _of(criterion)
        over = f"mean of the last {criterion['updates']} updates" if criterion["updates"] > 1 else "the last value"
        both = math.isfinite(criterion["own"]) and math.isfinite(criterion["fp32"])
        allowed = f"; allowed {shown(criterion['allowed'])} ({criterion['how']})" if both else ""
        ends = f"{shown(criterion['own'])} as it is, {shown(criterion['fp32'])} in FP32"
        out.append(f"criterion: {metric}, {over}: {ends}{allowed}")
    if parted is not None:
        what = "the loss" if parted["what"] == "loss" else f"the gradient norm of {parted['layer'] or 'the model'!r}"
        what += _of(parted)
        explained = "" if math.isnan(parted["allowed"]) else f"; rounding explains {shown(parted['allowed'])}"
        out.append(
            f"they part at update {parted['update']}: {what} is {shown(parted['own'])} as it is, "
            f"{shown(parted['fp32'])} in FP32{explained}"
        )
    elif doc["comparable"]:
        out.append(f"they part nowhere in {doc['compared']:,} updates beyond what rounding explains")
    for side, run in doc["runs"].items():
        out.append(f"{NAMES[side]}: {_ran(run)}")
    out += doc["verdict"]["notes"]
    findings = [f for f in doc["runs"]["own"]["findings"] if f["severity"] != "info"]
    for finding in findings[:5]:
        at = finding["at"]
        where = f" {at['file'].rpartition('/')[2]}:{at['line']}" if at else ""
        out.append(f"the doctor on the script as it is: {finding['rule']}{where}: {finding['message']}")
    if doc["comparable"]:
        out.append(f"what rounding explains: {doc['measure']}")
    return out


def _of(part: Mapping[str, Any]) -> str:
    """Whose it is, where a script has several optimizers."""
    return "" if part.get("optimizer") is None else f" of optimizer {part['optimizer']}"


def _ran(run: Mapping[str, Any]) -> str:
    parts = [f"{run['attempted']:,} attempted updates, {run['applied']:,} applied"]
    if run["schedule"] is not None:
        parts.append(f"schedule at {run['schedule']}")
    if run["lr"] is not None:
        parts.append(f"learning rate {shown(run['lr'])}")
    if run["scale"] is not None:
        parts.append(f"loss scale {shown(run['scale'])}")
    if run["seconds"] is not None:
        parts.append(f"{run['seconds']:.0f} s")
    if run["raised"] is not None:
        at = f" at {run['raised']['at']}" if run["raised"]["at"] else ""
        parts.append(f"ended by {run['raised']['type']}{at}")
    elif run["seconds"] is None:
        parts.append("cut short" if run["attempted"] else "not reached")
    elif run["exit"]:
        parts.append(f"exit status {run['exit']}")
    return " · ".join(parts)


def _updates(doc: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    titles, rows = update_rows(doc)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for cells, is_parting in rows:
        table.add_row(*cells, style="bold" if is_parting else None)
    return table


def update_rows(doc: Mapping[str, Any]) -> tuple[list[str], list[tuple[list[str], bool]]]:
    """Titles; then some updates, as it is before FP32 (once where both are the same), and whether they part there."""
    several = len({row["optimizer"] for row in doc["updates"]}) > 1
    titles = [
        "update",
        *(["optimizer"] if several else []),
        "loss",
        "FP32",
        "norm",
        "FP32",
        "outcome",
        "applied",
        "rate",
    ]
    parted = None if doc["parted"] is None else doc["parted"]["update"]
    rows = []
    for row in chosen(doc["updates"], parted):
        own, fp32 = row["own"], row["fp32"]
        cells = [f"{row['update']:,}", *([str(row["optimizer"])] if several else [])]
        cells += [shown(x) for x in (own["loss"], fp32["loss"], own["norm"], fp32["norm"])]
        cells += [_both(own["outcome"], fp32["outcome"]), _both(f"{own['applied']:,}", f"{fp32['applied']:,}")]
        cells.append(_both(shown(own["lr"]), shown(fp32["lr"])))
        rows.append((cells, row["update"] == parted))
    return titles, rows


def _both(own: str, fp32: str) -> str:
    return own if own == fp32 else f"{own} / {fp32}"


def _layers(doc: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"layer, update {layers[0]['update']}")
    for title in ("norm", "FP32", "times what rounding explains"):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in layers:
        own, fp32, excess = layer["own"], layer["fp32"], layer["excess"]
        table.add_row(layer["layer"] or "the model", shown(own), shown(fp32), shown(excess))
    return table


def named_layers(doc: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The layers furthest apart, at the parting and at the last update that was sampled."""
    layers: list[Mapping[str, Any]] = doc["layers"] if doc["comparable"] else []
    moments = {layer["update"] for layer in layers}
    parted = None if doc["parted"] is None else doc["parted"]["update"]
    wanted = sorted(at for at in moments if at in (parted, max(moments)))
    return [[layer for layer in layers if layer["update"] == at][:_LAYERS] for at in wanted]


def chosen(rows: Sequence[Mapping[str, Any]], parted: int | None) -> list[Mapping[str, Any]]:
    """Some rows: ever further apart, with the first, the last and the parting."""
    last = len(rows) - 1
    wanted = {0, last, *(round(last ** (n / (_ROWS - 2))) for n in range(_ROWS - 1))}
    return [row for n, row in enumerate(rows) if n in wanted or row["update"] == parted]


def shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
