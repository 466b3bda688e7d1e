"""The report of `doctor` for a terminal: 80 columns, readable without colour."""

from collections.abc import Iterator

from bf16forensics.investigate.doctor.result import FAIL, GROUPS, NOTED, PASS, SKIPPED, Check, DoctorReport
from bf16forensics.report.console import encodable
from bf16forensics.report.layout import BLANK, Line, labelled
from bf16forensics.verdict.words import count

_WIDEST = 80
_NARROWEST = 60
_STYLES = {PASS: "", FAIL: "bold red", NOTED: "yellow", SKIPPED: "dim"}
_GIB = 2**30


def doctor_lines(report: DoctorReport, tool_version: str, width: int, encoding: str | None) -> list[Line]:
    """Builds the report.

    Args:
        report: what was found.
        tool_version: version of this package.
        width: columns; at least 60 and at most 80 are used.
        encoding: of the stream; characters that it lacks are escaped.
    """
    columns = min(max(width, _NARROWEST), _WIDEST)
    lines = [*_system(report, tool_version, columns), *_verdict(report, columns)]
    for group in GROUPS:
        checks = [check for check in report.checks if check.group == group]
        if checks:
            lines += [BLANK, Line(text=group.upper(), style="bold")]
            lines += [line for check in checks for line in _check(check, columns)]
    parts = [f"{report.count(status)} {status}" for status in (PASS, FAIL, NOTED, SKIPPED)]
    closing = f"{count(len(report.checks), 'check')}: {', '.join(parts)}; {report.wall_s:.1f} s"
    return [encodable(line, encoding) for line in [*lines, BLANK, *labelled("done", closing, columns)]]


def _system(report: DoctorReport, tool_version: str, width: int) -> Iterator[Line]:
    system = report.system
    yield from labelled("doctor", f"bf16forensics {tool_version}, {system.platform}, Python {system.python}", width)
    processors = f"{count(system.threads, 'thread')} on {count(system.processors, 'processor')}"
    yield from labelled("cpu", f"{system.cpu or 'unknown model'}, {system.vector_isa}, {processors}", width)
    if system.no_gpu is not None:
        yield from labelled("gpu", f"none: {system.no_gpu}", width)
    for gpu in system.gpus:
        facts = [f"compute capability {gpu.capability}", f"{gpu.memory_bytes / _GIB:.0f} GiB"]
        facts += [f"driver {gpu.driver}"] if gpu.driver else []
        facts += [f"CUDA {gpu.cuda}"] if gpu.cuda else []
        yield from labelled("gpu", f"{gpu.where} {gpu.name}: {', '.join(facts)}", width)
    present = [f"{package.name} {package.version}" for package in system.packages if package.version is not None]
    yield from labelled("packages", ", ".join(present), width)
    missing = [package for package in system.packages if package.version is None]
    if missing:
        names = [item.name + (f" (extra {item.extra})" if item.extra else " (required)") for item in missing]
        yield from labelled("missing", ", ".join(names), width)
    reducing = [f"{setting.name}={setting.value}" for setting in report.settings if setting.reduces]
    moving = [
        f"{setting.name}={setting.value}"
        for setting in report.settings
        if not setting.reduces and setting.value is not None and setting.name.isupper()
    ]
    text = f"that can cost FP32 bits: {', '.join(reducing) or 'none'}"
    yield from labelled("settings", f"{text}; others: {', '.join(moving)}" if moving else text, width)


def _verdict(report: DoctorReport, width: int) -> list[Line]:
    failed = report.count(FAIL)
    if failed:
        text = f"{count(failed, 'check')} failed: what the tool relies on does not hold on this machine"
        return labelled("VERDICT", text, width, style="bold red")
    return labelled("VERDICT", "everything tested that the tool relies on holds here", width, style="bold")


def _check(check: Check, width: int) -> Iterator[Line]:
    style = _STYLES[check.status]
    yield from labelled(check.status, f"{check.where}, {check.name}: {check.observed}", width, style=style)
    if check.status == FAIL:
        yield from labelled("", f"expected: {check.expected}", width, style=style)
    if check.status != PASS:
        yield from labelled("", f"means: {check.what_it_means}", width, style=style)
