"""The JSON document of `doctor`: the contract for scripts."""

from collections.abc import Sequence

from bf16forensics.investigate.doctor.result import STATUSES, DoctorReport, UnitProbe
from bf16forensics.report.environment import Environment, environment_object
from bf16forensics.report.jsonio import opening, plain


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
        **opening(command, tool_version=environment.tool_version),
        "environment": environment_object(environment, {"wall_s": report.wall_s}),
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
