"""Processors of this process."""

import os


def usable_cores() -> int:
    """Processors that this process may run on: its affinity where the system has one, else all; at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
