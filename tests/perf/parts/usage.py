"""What processes have used, as the kernel counts it."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the processor time of one process with all its threads, in seconds, to a hundredth."""
    return sum(_times(pid)[:2]) / _TICKS_PER_S


def family_cpu_s(pid: int) -> float:
    """Return the processor time of a process and of its children, also of those that have ended."""
    return (sum(_times(pid)) + sum(sum(_times(child)[:2]) for child in _children(pid))) / _TICKS_PER_S


def peak_mib(pid: int) -> float:
    """Return the most memory that a process has had resident so far, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"the kernel does not tell the memory of process {pid}")


def _times(pid: int) -> list[int]:
    """Return user and system time, and those of children that have ended, in ticks."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return [0, 0, 0, 0]
    return [int(each) for each in after_name[11:15]]


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
