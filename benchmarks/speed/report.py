"""A row's result as a table for people, and as Markdown for reports: `python -m benchmarks.speed report FILE...`"""

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "peft",
    "accelerate",
    "trl",
    "triton",
    "tokenizers",
    "datasets",
    "pyarrow",
)
# Columns of the table of runs: field, heading, format.
COLUMNS = (
    ("generate_s", "generate s", "{:.3f}"),
    ("generate_tokens_per_s", "generated tokens/s", "{:,.0f}"),
    ("score_s", "score s", "{:.3f}"),
    ("score_tokens_per_s", "scored tokens/s", "{:,.0f}"),
    ("score_mfu", "score MFU", "{:.1%}"),
    ("train_s", "train s", "{:.3f}"),
    ("train_tokens_per_s", "trained tokens/s", "{:,.0f}"),
    ("train_mfu", "train MFU", "{:.1%}"),
    ("step_s", "step s", "{:.3f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("samples_per_s", "samples/s", "{:.2f}"),
    ("rows_per_s", "rows/s", "{:,.0f}"),
    ("slowest", "slowest", "{:,.0f}"),
    ("fastest", "fastest", "{:,.0f}"),
    ("load", "load before", "{:.1f}"),
    ("cpu_s", "CPU s", "{:.1f}"),
    ("processes", "processes", "{}"),
    ("mean_length", "response", "{:.0f}"),
    ("score", "score, last 10 steps", "{:.3f}"),
    ("kl", "KL, last 10 steps", "{:.3f}"),
    ("peak_gib", "peak GiB", "{:.1f}"),
    ("host_gib", "host GiB", "{:.1f}"),
    ("backend", "backend", "{}"),
    ("start_s", "start s", "{:.1f}"),
    ("sizes", "micro-batch x accumulation, ...", "{}"),
)


def environment(root: Path) -> dict[str, Any]:
    """Versions and commit. No environment variables: they may hold secrets."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = done.stdout.strip() or None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "commit": commit,
    }


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A markdown table with columns of equal width, so that it is read on a terminal too."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def runs_table(runs: dict[str, dict[str, Any]]) -> str:
    """One line a run, with the columns that any of them has."""
    shown = {name: run for name, run in runs.items() if name != "device"}
    columns = [column for column in COLUMNS if any(run.get(column[0]) is not None for run in shown.values())]

    def cell(run: dict[str, Any], field: str, form: str) -> str:
        return form.format(run[field]) if run.get(field) is not None else "failed" if "error" in run else "-"

    rows = [[name, *(cell(run, field, form) for field, _, form in columns)] for name, run in shown.items()]
    return table(["run", *(heading for _, heading, _ in columns)], rows)


def figures_table(figures: list[dict[str, Any]]) -> str:
    """One line a figure; the last column says whether its target holds, where it was asked."""
    said = {None: "", True: "yes", False: "NO"}
    rows = [[f["name"], f"{f['value']:.5g} {f['unit']}".strip(), f["target"], said[f["met"]]] for f in figures]
    return table(["figure", "value", "target", "met"], rows)


def for_people(result: dict[str, Any]) -> str:
    """Both tables, and what failed."""
    parts = [runs_table(result["runs"]), figures_table(result["figures"])]
    parts += [f"FAILED: {name}: {run['error']}" for name, run in result["runs"].items() if "error" in run]
    return "\n\n".join(parts)


def markdown(result: dict[str, Any]) -> str:
    """A section of a report in benchmarks/reports: the question's sizes, machine, versions, tables, configuration."""
    device, surroundings = result["runs"].get("device", {}), result["environment"]
    machine = f"Device: {device.get('name', 'not measured')}"
    if "bandwidth" in device:
        machine += (
            f", copies {device['bandwidth'] / 1e12:.3g} TB/s, matrix products {device['flops'] / 1e12:.4g} TFLOP/s"
        )
    versions = ", ".join(f"{name} {version}" for name, version in surroundings["versions"].items())
    sizes = ", ".join(f"{name} {value}" for name, value in result["settings"].items() if value not in ("", None))
    flags = "\n".join(f"{name}: {run['flags']}" for name, run in result["runs"].items() if run.get("flags"))
    resolved = "\n".join(f"{name}: {value}" for name, value in result["config"].items())
    parts = [
        f"## {result['row']}",
        f"{machine}. Python {surroundings['python']}, {versions}. Commit {surroundings['commit'] or 'unknown'}.",
        f"Sizes: {sizes}.",
        for_people(result),
        f"<details><summary>Flags of each run</summary>\n\n```text\n{flags}\n```\n</details>",
        f"<details><summary>Resolved configuration of the first run</summary>\n\n```text\n{resolved}\n```\n</details>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def print_reports(files: list[str]) -> None:
    """The sections of saved results, one after the other."""
    for file in files:
        lines = Path(file).read_text(encoding="utf-8").strip().splitlines()
        print(markdown(json.loads(lines[-1])))
