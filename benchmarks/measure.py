"""What the benchmarks share: medians of processor time, and how much memory a command of its own took at most."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def cpu_ms(function: Callable[[], Any], repeats: int) -> float:
    """Median processor milliseconds of a call, after one that does not count.

    Processor time, not the clock's, so that another program on the machine distorts it less.
    """
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times[1:])


def peak_mib() -> float:
    """The most memory this process has held so far, in MiB."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / 2**10 if sys.platform != "darwin" else held / 2**20


def in_own_process(script: str, *arguments: str) -> str:
    """Runs a script in a process of its own, so that its peak is its own, and gives the last line it printed."""
    done = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()
