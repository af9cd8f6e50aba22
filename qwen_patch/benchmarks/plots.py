"""Plots of result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import whole


def plot_generate(document: dict[str, Any], path: Path) -> None:
    """Decode and end-to-end speed against stock, a group of bars a prompt length, with the 95% intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    prompts = list(dict.fromkeys(row["prompt"] for row in document["rows"]))
    variants = list(dict.fromkeys(row["variant"] for row in document["rows"]))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, key, title in zip(
        axes, ("decode_vs_stock", "end_to_end_vs_stock"), ("decode", "end to end"), strict=True
    ):
        for i, variant in enumerate(variants):
            rows = {row["prompt"]: row[key] for row in document["rows"] if row["variant"] == variant}
            shown = [(x, rows[p]) for x, p in enumerate(prompts) if rows[p] is not None]
            heights = [entry["ratio"] for _, entry in shown]
            errors = [[max(0.0, e["ratio"] - e["interval95"][0]) for _, e in shown]]
            errors.append([max(0.0, e["interval95"][1] - e["ratio"]) for _, e in shown])
            positions = [x + (i - (len(variants) - 1) / 2) * 0.8 / len(variants) for x, _ in shown]
            axis.bar(positions, heights, 0.8 / len(variants), yerr=errors, label=variant, capsize=2)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(prompts)), [str(p) for p in prompts])
        axis.set_xlabel("prompt tokens")
        axis.set_title(title)
    axes[0].set_ylabel("times stock")
    axes[0].legend()
    environment = document["environment"]
    figure.suptitle(f"{document['model']}, {document['dtype']}, {environment['device_name']}")
    figure.tight_layout()
    with whole(path) as part:
        figure.savefig(part, dpi=120, format="png")
    plt.close(figure)
