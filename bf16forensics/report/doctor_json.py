"""The JSON document of `doctor`: the contract for scripts."""

from collections.abc import Sequence

from bf16forensics.investigate.doctor.result import STATUSES, DoctorReport, UnitProbe
from bf16forensics.report.environment import Environment
from bf16forensics.report.jsonio import SCHEMA_VERSION, plain


def doctor_document(report: DoctorReport, *, command: Sequence[str], environment: Environment) -> dict[str, object]:
    """Builds the document of one run.

    Args:
        report: what was found.
        command: the command as run, program name first.
        environment: versions and machine.

    Returns:
        Dictionaries, lists, strings, integers, booleans and None.
    """
    built: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "bf16forensics", "version": environment.tool_version},
        "command": list(command),
        "environment": {
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
                "wall_s": report.wall_s,
            },
        },
        "verdict": report.verdict,
        "counts": {status: report.count(status) for status in STATUSES},
        "system": report.system,
        "settings": report.settings,
        "checks": report.checks,
        "units": [_unit(unit) for unit in report.units],
    }
    return {key: plain(value) for key, value in built.items()}


def _unit(unit: UnitProbe) -> dict[str, object]:
    fields = plain(unit)
    return {**fields, "models": list(unit.models)} if isinstance(fields, dict) else {}
