"""The one shape in which every benchmark prints what it found."""

import json
import operator
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from midstream.local.machine import describe_machine

_OPERATORS = {"<=": operator.le, ">=": operator.ge}


def target(name: str, values: Sequence[float], unit: str, op: str, bound: float) -> dict[str, Any]:
    """An entry of ``targets``: the median of ``values`` against ``bound``, with their minimum and maximum."""
    value = statistics.median(values)
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "op": op,
        "target": bound,
        "met": _OPERATORS[op](value, bound),
        "spread": [min(values), max(values)],
    }


def publish(targets: list[dict[str, Any]], rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the result: one JSON object, or lines for people."""
    if as_json:
        command = shlex.join(["python", *sys.argv])
        print(
            json.dumps({"machine": describe_machine(), "command": command, "targets": targets, "rows": rows})
        )
        return
    for entry in targets:
        verdict = "met" if entry["met"] else "NOT met"
        low, high = entry["spread"]
        print(
            f"{entry['name']}: {entry['value']:.4g} {entry['unit']} "
            f"(min {low:.4g}, max {high:.4g}); target {entry['op']} {entry['target']:g}: {verdict}"
        )
    for row in rows:
        print("  " + ", ".join(f"{key} {value}" for key, value in row.items()))
