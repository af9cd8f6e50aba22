"""Tables on a terminal. What they show comes from the plan, the report or the result document, unchanged."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from .benchmarks import gemm
from .benchmarks.generate import TERMINAL_COLUMNS, flat_rows
from .benchmarks.results import cell
from .plan import Plan
from .validation.validate import Report


def show_plan(console: Console, plan: Plan) -> None:
    table = Table(
        title=plan.title,
        title_justify="left",
        caption=f"{len(plan.replaced)} of {len(plan.decisions)} modules replaced",
    )
    for heading in ("site", "modules", "replacement", "why not"):
        table.add_column(heading)
    for site, what, why, count in plan.summary():
        table.add_row(site, str(count), what, why)
    console.print(table)
    console.print(f"generate: {plan.generation_line}")
    for note in plan.notes:
        console.print(f"note: {note}")


def show_validation(console: Console, report: Report) -> None:
    quantize = "" if report.quantize is None else f", {report.quantize}"
    title = f"{report.model}, fusion={report.fusion}{quantize}, {report.dtype} on {report.device}"
    table = Table(title=title, title_justify="left")
    table.add_column("measured")
    table.add_column("value", justify="right")
    rows = {
        "modules replaced": report.modules_replaced,
        "positions compared": report.positions,
        "largest logit error": f"{report.max_abs_logit_error:.3g}",
        "mean logit error": f"{report.mean_abs_logit_error:.3g}",
        "mean KL divergence, nats": f"{report.kl_mean:.3g}",
        "top-1 agreement": f"{report.top1_agreement:.2%}",
        f"greedy tokens equal ({report.new_tokens} new)": "yes" if report.greedy_tokens_equal else "no",
        "undo is bitwise": "yes" if report.undo_bitwise else "NO",
    }
    if report.oracle and "top1_agreement_or_tie" in report.oracle:
        rows["top-1 agreement, or a tie"] = f"{report.oracle['top1_agreement_or_tie']:.2%}"
    if report.oracle:
        rows["stock, mean error against float32"] = f"{report.oracle['stock_mean_abs_error']:.3g}"
        rows["patched, mean error against float32"] = f"{report.oracle['patched_mean_abs_error']:.3g}"
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    for line in report.greedy_differences:
        console.print(f"  {line}")
    if report.passed:
        console.print("[green bold]PASSED[/]")
        return
    console.print("[red bold]NOT PASSED[/]")
    for reason in report.reasons:
        console.print(f"  {reason}")
    if report.first_difference:
        console.print(f"  the runs part at {report.first_difference}")


def show_rows(console: Console, title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(cell(row.get(key)) for key in columns))
    console.print(table)


def show_bench(console: Console, document: dict[str, Any]) -> None:
    env = document["environment"]
    what = f"{document['model']}, {document['dtype']}, {document['settings']['decoding']}"
    title = f"{what}, {env['device_name']}, copy {document['copy_gbps']:,.0f} GB/s"
    show_rows(console, title, flat_rows(document), TERMINAL_COLUMNS)


def show_gemm(console: Console, document: dict[str, Any]) -> None:
    """A table a shape, with half the distance of the quartiles beside each time; errors as shares of their bounds."""
    for (M, N, K), rows in groupby(gemm.flat_rows(document), key=lambda row: row["shape"]):
        shown = [row for row in rows if row["correct"] is not None]
        for row in shown:
            if row["correct"]:
                low, high = row["us_quartiles"]
                row["time"] = f"{cell(row['us'])} ±{(high - low) / 2 / row['us']:.0%}"
        title = f"{shown[0]['layer']} M {M}, N {N}, K {K}".lstrip()
        show_rows(console, title, shown, gemm.columns(document, gemm.TERMINAL_COLUMNS))
    for note in gemm.notes(document):
        console.print(note, highlight=False)
    console.print(gemm.title(document), highlight=False)


def show_examination(console: Console, found: dict[str, Any]) -> None:
    table = Table(title="qwen_patch", title_justify="left", show_header=False)
    for name, value in found["versions"].items():
        table.add_row(name, value)
    for kind, state in found["libraries"].items():
        table.add_row(f"{kind} library", state)
    console.print(table)
    for line in found["advice"] or ["all well"]:
        console.print(f"-> {line}", highlight=False)
