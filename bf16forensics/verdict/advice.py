"""What to run next, and what a run does not say."""

import shlex
from collections.abc import Sequence

from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.recipe.derive import flip
from bf16forensics.recipe.describe import base_preset
from bf16forensics.recipe.model import Recipe
from bf16forensics.verdict.findings import CANNOT_JUDGE, NOISE_AT_CHANCE, Finding, HeadVerdict
from bf16forensics.verdict.words import about, count

#: Options of the earlier run that a repetition must not take over: outputs would collide, and reading is meant.
_OUTPUT = ("-o", "--output")
_DROPPED_WITH_VALUE = _OUTPUT
_DROPPED = ("--force", "--json")
#: Heads whose tensors hold NaN or Inf, which cannot be traced.
_NOT_FINITE = "BF401"


def rerun(command: Sequence[str], option: str, value: str | None = None, *, without: Sequence[str] = ()) -> str:
    """The earlier command with one option set, ready for a shell.

    Args:
        command: the command as run, program name first; empty when unknown.
        option: option to set, "--recipe".
        value: its value; None for a flag.
        without: further options with values to leave out.

    Returns:
        The command quoted for a POSIX shell; "bf16forensics localize ..." for an unknown one.
    """
    setting = [option] if value is None else [option, value]
    if not command:
        return f"bf16forensics localize ... {shlex.join(setting)}"
    kept: list[str] = []
    skip = False
    for word in command:
        name = word.partition("=")[0]
        if skip:
            skip = False
        elif name in (*_DROPPED_WITH_VALUE, *without) or (name == option and value is not None):
            skip = "=" not in word
        elif name not in _DROPPED and name != option:
            kept.append(word)
    return shlex.join([*kept, *setting])


def flipped(recipe: Recipe, point: str) -> str | None:
    """Name of the recipe with one rounding point in FP32; None if it is so already or the recipe is a file's own."""
    if base_preset(recipe) is None or getattr(recipe, point) == "fp32":
        return None
    return flip(recipe, point).name


def more_sequences(result: LocalizeResult, command: Sequence[str], needed: int | None) -> str:
    """How to get the sequences that would decide."""
    amount = "more sequences" if needed is None else f"about {about(needed)} sequences"
    if result.kind == "record":
        return f"record {amount} and localize again"
    # Without --lines and --sequences a run goes through everything that was recorded.
    limiting = ("--lines", "--sequences")
    if command and not any(word.partition("=")[0] in limiting for word in command):
        return f"record more steps ({amount}) and localize again"
    return rerun(command, "--until-decided", without=limiting)


def case_of(command: Sequence[str]) -> str | None:
    """The case that a command wrote, as it was named; None where it wrote none."""
    written = None
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if word in _OUTPUT:
            written = next(iter(command[index + 1 :]), None)
        elif name == _OUTPUT[1] and equals:
            written = value
    return written or None


def trace_first(heads: Sequence[HeadVerdict], verdict: str, command: Sequence[str]) -> str | None:
    """How to open up the first head of the verdict; None without a case, at noise level, or without finite numbers.

    Args:
        heads: every head, the most important first.
        verdict: verdict of the run.
        command: the command as run.
    """
    case = case_of(command)
    first = next((head for head in heads if head.verdict == verdict and head.code != _NOT_FINITE), None)
    if case is None or first is None or verdict == NOISE_AT_CHANCE:
        return None
    return shlex.join(["bf16forensics", "trace-head", case, "--layer", str(first.layer), "--head", str(first.head)])


def next_commands(
    result: LocalizeResult,
    verdict: str,
    findings: Sequence[Finding],
    heads: Sequence[HeadVerdict],
    command: Sequence[str],
) -> tuple[str, ...]:
    """At most four steps, the most useful first, without repetitions.

    Args:
        result: what was measured.
        verdict: verdict of the run.
        findings: the findings, the most serious first.
        heads: every head, the most important first.
        command: the command as run.
    """
    steps = [finding.next_command for finding in findings if finding.severity != "note"]
    if verdict == CANNOT_JUDGE:
        steps += [finding.next_command for finding in findings if finding.code.startswith("BF9")]
    trace = trace_first(heads, verdict, command)
    if trace is not None:
        steps.insert(1, trace)
    if findings:
        deciding = [head.code for head in heads if head.verdict == verdict and head.code is not None]
        steps.append(f"bf16forensics explain {deciding[0] if deciding else findings[0].code}")
    unique = list(dict.fromkeys(step for step in steps if step))
    return tuple([*unique[:3], unique[-1]] if len(unique) > 4 else unique)


def not_checked(result: LocalizeResult) -> tuple[str, ...]:
    """What this run says nothing about, as sentences; never empty."""
    missing = []
    if result.interrupted or result.sequences < result.sequences_planned:
        missing.append(
            f"{result.sequences_planned - result.sequences:,} of {result.sequences_planned:,} sequences: stopped"
        )
    if result.heads and all(head.delta_err is None for head in result.heads):
        missing.append(f"the backward pass: {result.no_gradient or 'there is no dO'}")
    elif result.heads and all(head.dw_q is None for head in result.heads):
        missing.append("the coupling to W_Q: the input of the projection is unknown")
    if result.unused_tensors:
        missing.append(f"{count(len(result.unused_tensors), 'unused attention tensor')} (BF403)")
    products = "FP32" if result.recipe.arithmetic == "fp32" else result.recipe.arithmetic
    if result.backend.name != "reference":
        products = f"{result.backend.name}'s"
    missing.append(f"the kernel on its hardware (recipe {result.recipe.name} was emulated, {products} products)")
    missing.append("errors that travel through dX (dO is taken as given)")
    missing.append("W_K, W_V")
    missing.append("persistence in time (steps recorded at one checkpoint are more batches)")
    return tuple(missing)
