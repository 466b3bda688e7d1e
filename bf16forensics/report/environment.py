"""What a run ran on, read from package metadata: importing a tensor library only to print its version is not needed."""

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from bf16forensics.investigate.cores import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions and machine. The fields after `device` differ between runs and machines."""

    #: Version of this package.
    tool_version: str
    #: Versions; None where a package is not installed.
    python: str
    torch: str | None
    numpy: str | None
    triton: str | None
    #: "Linux x86_64".
    platform: str
    #: Device of the analysis: "cpu".
    device: str
    #: Threads that the analysis used.
    threads: int
    host: str
    #: Start of the report, UTC, ISO 8601 with seconds.
    date: str
    #: Directory that relative paths of the command are relative to; empty where the system does not tell.
    working_directory: str = ""


def package_version(name: str) -> str | None:
    """Version of an installed package; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def collect(*, tool_version: str, threads: int | None = None, device: str = "cpu") -> Environment:
    """Reads the environment of this process.

    Args:
        tool_version: version of this package.
        threads: threads that the analysis used; None for the number of processors this process may run on.
        device: device of the analysis.
    """
    if threads is None:
        threads = usable_cores()
    return Environment(
        tool_version=tool_version,
        python=platform.python_version(),
        torch=package_version("torch"),
        numpy=package_version("numpy"),
        triton=package_version("triton"),
        platform=f"{platform.system()} {platform.machine()}",
        device=device,
        threads=threads,
        host=socket.gethostname(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        working_directory=_working_directory(),
    )


def environment_object(environment: Environment, measured: Mapping[str, object]) -> dict[str, object]:
    """The environment as a JSON document has it; what differs from run to run stands under "volatile".

    Args:
        environment: versions and machine.
        measured: further volatile fields, such as times.
    """
    return {
        "python": environment.python,
        "torch": environment.torch,
        "numpy": environment.numpy,
        "triton": environment.triton,
        "platform": environment.platform,
        "device": environment.device,
        "volatile": {
            "date": environment.date,
            "host": environment.host,
            "threads": environment.threads,
            "working_directory": environment.working_directory,
            **measured,
        },
    }


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
