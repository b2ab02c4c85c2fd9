# ruff: noqa: E501 - the style sheet
"""The report as one HTML file: findings, what ran, and its curves; no script, nothing fetched, fit to print."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from halfstep.checks.judge import Summary
from halfstep.events import Finding
from halfstep.record.history import History, Row
from halfstep.report.chart import curve
from halfstep.report.exponents import strips
from halfstep.report.terminal import counted, judged, ran, where

_AROUND = 2  # source lines shown before and after the one that is named


def page(title: str, findings: Sequence[Finding], summary: Summary, history: History, facts: dict[str, str]) -> str:
    """The whole file. ``facts``: versions, command and so on, shown at the end as they are given."""
    loud = [f for f in findings if f.severity != "info"]
    verdict = "clean" if not loud and summary.micro_batches else counted(findings)
    body = [
        f'<header><p class="brand">halfstep</p><h1>{escape(title)}</h1>'
        f'<p class="verdict {"good" if not loud else "bad"}">{escape(verdict)}</p>'
        f"<p>{escape(ran(summary))}</p><p class='dim'>{escape(judged(summary))}</p></header>",
    ]
    if findings:
        body.append("<section><h2>Findings</h2>" + "".join(map(_finding, findings)) + "</section>")
    body.append(_curves(history))
    if history.gradients is not None:
        drawn = strips(history.gradients)
        body.append(f"<section><h2>Half-precision gradients</h2>{drawn}</section>" if drawn else "")
    body.append(_facts(summary, facts))
    return whole(title, body)


def whole(title: str, body: Sequence[str]) -> str:
    """One HTML file of these parts."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · halfstep</title><style>{_STYLE}</style>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _finding(finding: Finding) -> str:
    times = f" · {finding.count:,} times" if finding.count > 1 else ""
    evidence = "".join(
        f"<tr><th>{escape(str(key).replace('_', ' '))}</th><td>{escape(_value(value))}</td></tr>"
        for key, value in finding.evidence.items()
        if value is not None
    )
    return (
        f'<article class="{finding.severity}"><h3><span class="severity">{finding.severity}</span> '
        f"<code>{escape(finding.rule)}</code></h3>"
        f'<p class="dim">{escape(where(finding))}{escape(times)}</p><p>{escape(finding.message)}</p>{_source(finding)}'
        + (f'<p class="fix"><b>Fix</b> <code>{escape(finding.fix)}</code></p>' if finding.fix else "")
        + (f"<details><summary>numbers</summary><table>{evidence}</table></details>" if evidence else "")
        + "</article>"
    )


def _source(finding: Finding) -> str:
    if finding.at is None or not linecache.getline(finding.at.file, finding.at.line):
        return ""
    rows = []
    for number in range(max(1, finding.at.line - _AROUND), finding.at.line + _AROUND + 1):
        line = linecache.getline(finding.at.file, number)
        if line:
            css = ' class="named"' if number == finding.at.line else ""
            rows.append(f"<span{css}><i>{number}</i>{escape(line.rstrip())}</span>")
    return "<pre>" + "".join(rows) + "</pre>"


def _curves(history: History) -> str:
    rows = [row for _, row in history.rows]
    if len(rows) < 2:
        return ""
    optimizers = sorted({row.optimizer for row in rows})
    figures: list[str] = []
    for optimizer in optimizers[:4]:
        own = [row for row in rows if row.optimizer == optimizer]
        name = f", optimizer {optimizer}" if len(optimizers) > 1 else ""
        skipped = [float(row.attempted) for row in own if row.outcome == "skipped"][:400]
        axis = "attempted update" + (" (lines: skipped)" if skipped else "")

        def points(field: str, own: Sequence[Row] = own) -> list[tuple[float, float | None]]:
            return [(float(row.attempted), getattr(row, field)) for row in own]

        figures += [
            curve(f"loss{name}", points("loss"), x_label=axis, marks=skipped, mark_label="skipped update"),
            curve(f"gradient norm{name}", points("norm"), x_label=axis, log=True),
            curve(f"loss scale{name}", points("scale"), x_label=axis, log=True, base=2.0, steps=True, marks=skipped),
            curve(f"learning rate{name}", points("lr"), x_label=axis) if _varies(own) else "",
        ]
    shown = "".join(f"<figure>{f}</figure>" for f in figures if f)
    note = f"<p class='dim'>every {history.rows.stride}th update drawn</p>" if history.rows.stride > 1 else ""
    return f"<section><h2>Updates</h2>{note}{shown}</section>" if shown else ""


def _varies(rows: Sequence[Row]) -> bool:
    return any(a.lr != b.lr for a, b in pairwise(rows))


def _facts(summary: Summary, facts: dict[str, str]) -> str:
    sizes = ", ".join(f"{size} micro-batches in {count:,} updates" for size, count in summary.sizes.items())
    table = {"micro-batches per update": sizes, **facts}
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in table.items() if v)
    return f"<section><h2>Record</h2><table>{rows}</table></section>"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_value(v)}" for k, v in value.items())
    return str(value)


_STYLE = """
:root{--ink:#1b1f24;--dim:#5f6b76;--paper:#fff;--soft:#f4f6f8;--line:#dde3e8;--error:#b3261e;--warning:#8a5a00;
--info:#1f5f8b;--good:#1a7f4b;--curve:#1f5f8b}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--dim:#9aa5b0;--paper:#14181c;--soft:#1d2329;--line:#2e363e;
--error:#ff8a80;--warning:#ffc66d;--info:#82c4ff;--good:#6fd69b;--curve:#82c4ff}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:860px;margin:0 auto;padding:40px 24px}h1{margin:.1em 0;font-size:1.7rem;overflow-wrap:anywhere}
h2{margin:2em 0 .6em;font-size:1.15rem}h3{margin:0;font-size:1rem}p{margin:.35em 0}.dim{color:var(--dim);font-size:.9rem}
.brand{color:var(--dim);letter-spacing:.12em;text-transform:uppercase;font-size:.75rem}
.verdict{font-size:1.2rem;font-weight:600}.good{color:var(--good)}.bad{color:var(--error)}
article{border:1px solid var(--line);border-left:4px solid var(--info);border-radius:6px;padding:14px 18px;margin:14px 0;
break-inside:avoid}article.error{border-left-color:var(--error)}article.warning{border-left-color:var(--warning)}
.severity{font-weight:700;color:var(--info)}.error .severity{color:var(--error)}.warning .severity{color:var(--warning)}
code,pre{font:.87rem/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}pre{background:var(--soft);border-radius:4px;
padding:8px 0;overflow-x:auto;margin:.6em 0}pre span{display:block;padding:0 12px}pre i{display:inline-block;width:3.2em;
color:var(--dim);font-style:normal;user-select:none}pre .named{background:color-mix(in srgb,var(--warning) 18%,transparent)}
.fix code{white-space:pre-wrap}details{margin-top:.5em;color:var(--dim)}table{border-collapse:collapse;font-size:.9rem}
th{text-align:left;font-weight:500;color:var(--dim);padding:2px 18px 2px 0;vertical-align:top}td{padding:2px 0;
overflow-wrap:anywhere}figure{margin:10px 0}svg{width:100%;height:auto}svg text{fill:var(--dim);font-size:10px}
svg .title{fill:var(--ink);font-size:12px;font-weight:600}.grid{stroke:var(--line);stroke-width:1}
.cell{fill:var(--curve)}.curve{fill:none;stroke:var(--curve);stroke-width:1.6}.beside{stroke:var(--warning);stroke-width:2.4;opacity:.75}.mark{stroke:var(--error);stroke-width:1;opacity:.55}
@media print{main{padding:0}details{display:none}}
"""
