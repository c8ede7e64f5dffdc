"""Whether a machine carries a crowd of isolated sandboxes, and rollouts in them that never end.

A thousand sandboxes are started through the pool and live at once, beside as many bare bubblewraps; then
acquisitions are timed where spares lie ready. With --soak, 960 rollouts at a time are played for so many minutes,
with a snapshot every turn; then nothing may be left of them.

    python benchmarks/pool.py [--json] [--quick] [--soak MINUTES]
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from crowd import Crowd, acquire_spares, bare_bubblewraps, crowd, start_and_close_one
from remains import Remains, raise_descriptor_limit, remains
from result import publish, target
from soak import THINK_S, Soak, soak

from midstream.envs.pool.metrics import percentile

SANDBOXES, QUICK_SANDBOXES = 1000, 100
ROLLOUTS, QUICK_ROLLOUTS = 960, 64
QUICK_SOAK_MINUTES = 0.4
QUICK_THINK_S = (0.5, 1.5)
SPARE_ROUNDS, QUICK_SPARE_ROUNDS = 10, 3

STARTED_S, COLD_P99_S, WARM_P99_MS = 15.0, 2.0, 50.0
SETTLED_WITHIN_S, SETTLE_POLL_S = 10.0, 0.2
TOP_GROWTH = 1.05
# Of all rollouts; the rest begin or end.
LEAST_LIVE_SHARE = 0.9
# Of several failures of one kind the first few say enough.
MESSAGES = 5

Entries = list[dict[str, Any]]
Found = TypeVar("Found", Crowd, Soak)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a minute's version: a tenth of everything")
    parser.add_argument("--soak", type=float, default=None, metavar="MINUTES", help="play rollouts, too")
    parser.add_argument("--only-soak", action="store_true", help="leave the rest out")
    parser.add_argument(
        "--think",
        type=float,
        nargs=2,
        default=None,
        metavar="S",
        help="seconds between turns, from and to (default 5 15, quick 0.5 1.5)",
    )
    parser.add_argument("--rollouts", type=int, default=None, help="at a time (default 960, quick 64)")
    options = parser.parse_args()
    raise_descriptor_limit()
    minutes = options.soak or (QUICK_SOAK_MINUTES if options.quick else 0.0)
    targets: Entries = []
    rows: Entries = []
    with tempfile.TemporaryDirectory(prefix="midstream-crowd-") as scratch:
        root = Path(scratch)
        with asyncio.Runner() as runner:
            runner.run(start_and_close_one(root / "first"))
            if not options.only_soak:
                _measure_crowds(runner, root, options.quick, targets, rows)
            if minutes:
                rollouts = options.rollouts or (QUICK_ROLLOUTS if options.quick else ROLLOUTS)
                think_s = options.think or (QUICK_THINK_S if options.quick else THINK_S)
                found = _clean(runner, root / "soak", soak, rollouts, minutes, think_s)
                targets += _soak_targets(found, rollouts)
                rows += _soak_rows(found, think_s)
    publish(targets, rows, as_json=options.json)


def _measure_crowds(runner: asyncio.Runner, root: Path, quick: bool, targets: Entries, rows: Entries) -> None:
    wanted = QUICK_SANDBOXES if quick else SANDBOXES
    # The bare ones before and after, since the machine may be busier at one time than at another.
    bare = [bare_bubblewraps(wanted)]
    cold = _clean(runner, root / "cold", crowd, wanted)
    bare.append(bare_bubblewraps(wanted))
    warm = _clean(runner, root / "warm", acquire_spares, QUICK_SPARE_ROUNDS if quick else SPARE_ROUNDS)
    targets += _crowd_targets(cold, warm)
    rows += [_crowd_row("pool, cold", cold), *(_crowd_row("bare bubblewrap", each) for each in bare)]
    rows.append(_crowd_row("pool, spares", warm))
    rows.append(
        {
            "what": "pool / bare bubblewrap",
            "started": round(cold.started_s / statistics.mean(each.started_s for each in bare), 2),
        }
    )


def _clean(
    runner: asyncio.Runner, root: Path, measure: Callable[..., Coroutine[Any, Any, Found]], *arguments: Any
) -> Found:
    """What it measures below `root`, and what is left of it once nobody holds its store any more."""
    before = remains()
    found = runner.run(measure(root, *arguments))
    found.left = runner.run(_left_after_a_while(before, root))
    return found


async def _left_after_a_while(before: Remains, root: Path) -> dict[str, int]:
    """Connections of a store that nobody holds any more are closed when the collector of Python gets to them."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while True:
        gc.collect()
        left = remains([root / "sandboxes"], [root / "store"]).beyond(before)
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(SETTLE_POLL_S)


def _crowd_targets(cold: Crowd, warm: Crowd) -> Entries:
    cold_p99, warm_p99 = (percentile(sorted(each.acquired_s), 0.99) for each in (cold, warm))
    return [
        _one(f"{cold.wanted} isolated sandboxes at once, all started", cold.started_s, "s", STARTED_S),
        _one("sandboxes that failed", len(cold.failures) + len(warm.failures), "sandboxes", 0),
        _one("acquisition p99, cold, 64 in flight", cold_p99, "s", COLD_P99_S),
        _one("acquisition p99, spares, 64 in flight", warm_p99 * 1000, "ms", WARM_P99_MS),
        _one("left after close", sum(cold.left.values()) + sum(warm.left.values()), "things", 0),
    ]


def _crowd_row(what: str, found: Crowd) -> dict[str, Any]:
    times = sorted(found.acquired_s)
    return {
        "what": what,
        "backend": found.backend,
        "sandboxes": found.wanted,
        "started_s": round(found.started_s, 3),
        "p50_ms": round(percentile(times, 0.5) * 1000, 2),
        "p99_ms": round(percentile(times, 0.99) * 1000, 2),
        "closed_s": round(found.closed_s, 3),
        **{f"{name}_kib_each": round(size / 1024) for name, size in found.memory.items()},
        **_troubles(found.failures, found.left),
    }


def _soak_targets(found: Soak, rollouts: int) -> Entries:
    minutes = found.seconds / 60
    return [
        _one(
            f"failures of {rollouts} rollouts at a time in {minutes:g} min",
            len(found.failures),
            "failures",
            0,
        ),
        target("rollouts that have a sandbox", found.live(), "rollouts", ">=", LEAST_LIVE_SHARE * rollouts),
        _one("left after the rollouts", sum(found.left.values()), "things", 0),
        _one("memory of this process, end / half-time", found.growth("own"), "ratio", TOP_GROWTH),
        _one("memory of the sandboxes, end / half-time", found.growth("children"), "ratio", TOP_GROWTH),
    ]


def _soak_rows(found: Soak, think_s: Sequence[float]) -> Entries:
    rows: Entries = [
        {
            "what": "rollouts",
            "backend": found.backend,
            "think_s": list(think_s),
            **dict(found.counts),
            "turns_per_s": round(found.counts["turns"] / found.seconds, 1),
            "closed_s": round(found.closed_s, 2),
            **_troubles(found.failures, found.left),
        }
    ]
    for what, seconds in (
        ("start", found.start_s),
        ("step", found.step_s),
        ("snapshot", found.snapshot_s),
    ):
        times = sorted(seconds)
        rows.append(
            {
                "what": what,
                "count": len(times),
                "p50_ms": round(percentile(times, 0.5) * 1000, 2),
                "p99_ms": round(percentile(times, 0.99) * 1000, 2),
                "max_ms": round(times[-1] * 1000, 2) if times else 0.0,
            }
        )
    rows += [
        {
            "what": "sample",
            "at_s": round(sample.at_s, 1),
            "live": sample.live,
            "own_mib": sample.own >> 20,
            "children_mib": sample.children >> 20,
            "descriptors": sample.descriptors,
        }
        for sample in found.samples[:: max(1, len(found.samples) // 12)]
    ]
    return [*rows, {"what": "metrics", **{name: round(value, 3) for name, value in found.metrics.items()}}]


def _troubles(failures: list[str], left: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"failures": len(failures)}
    if failures:
        found["messages"] = failures[:MESSAGES]
    return found | ({"left": left} if left else {})


def _one(name: str, value: float, unit: str, bound: float) -> dict[str, Any]:
    return target(name, [value], unit, "<=", bound)


if __name__ == "__main__":
    main()
