"""What the benchmarks share: medians of processor time, and how much memory a command of its own took at most."""

from __future__ import annotations

import contextlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


def cpu_ms(function: Callable[[], Any], repeats: int) -> float:
    """Median processor milliseconds of a call, after one that does not count.

    Processor time, not the clock's, so that another program on the machine distorts it less.
    """
    return cpu_ms_in_turn([function], repeats)[0]


def cpu_ms_in_turn(functions: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median processor milliseconds of each, called in turn, so that other programs distort their ratios less."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            taken.append(1e3 * (time.process_time() - start))
    return [statistics.median(taken[1:]) for taken in times]


def peak_mib() -> float:
    """The most memory this process has held since `reset_peak`, or ever where that cannot be reset, in MiB."""
    if STATUS.is_file():
        return _status_mib("VmHWM")
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / 2**10 if sys.platform != "darwin" else held / 2**20


def reset_peak() -> float:
    """Begins the peak anew where the system can (Linux), and gives what the process holds now, in MiB."""
    if not STATUS.is_file():
        return peak_mib()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(name))
    return int(line.split()[1]) / 2**10


def in_own_process(script: str, *arguments: str) -> str:
    """Runs a script in a process of its own, so that its peak is its own, and gives the last line it printed."""
    done = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


def print_row(*cells: str) -> None:
    """A row of a Markdown table, at once."""
    print("| " + " | ".join(cells) + " |", flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        print_row(*row)
    print()
