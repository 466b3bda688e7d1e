"""What to run after a trace."""

import shlex

import numpy as np

from bf16forensics.evidence.trace.results import CumulativeTrace, HeadTrace, Jump
from bf16forensics.report.trace.context import TraceContext
from bf16forensics.verdict.advice import rerun

#: The accumulator that `bits` takes unless told otherwise, and one that keeps one stored value from key to key.
_PREFIX, _EACH_ADD = "fp32-prefix", "bf16-each-add"
#: The chain of a matrix unit, to be looked at beside the prefixes; it takes products of 16-bit operands.
_HARDWARE = "sm90"
_MULTIPLIED = ("bf16", "fp16")
#: Outputs and tables of the trace that a further one does not want.
_OUTPUTS = ("--plot", "--export", "--accumulator")


def next_commands(trace: HeadTrace, context: TraceContext) -> tuple[str, ...]:
    """Commands ready for a POSIX shell: the bits of the largest jump, and the same row by a matrix unit."""
    steps = [_bits(trace, context)]
    if trace.cumulative.accumulator == _PREFIX and context.recipe.p_bar in _MULTIPLIED and context.command:
        steps.append(rerun(context.command, "--accumulator", _HARDWARE, without=_OUTPUTS))
    return tuple(step for step in steps if step is not None)


def _bits(trace: HeadTrace, context: TraceContext) -> str | None:
    """The addition at the largest jump: by name where a case keeps the row, else by the two patterns."""
    cumulative = trace.cumulative
    if not cumulative.jumps:
        return None
    jump = cumulative.jumps[0]
    options = [] if cumulative.accumulator == _PREFIX else ["--accumulator", cumulative.accumulator]
    if context.case is not None and context.keeps_row:
        token = trace.traced
        row = f"L{trace.layer}.H{trace.head}:s{token.sequence}:t{token.token}:f{cumulative.feature}:k{jump.key}"
        return shlex.join(["bf16forensics", "bits", "--event", f"{context.case}:{row}", *options])
    patterns = _patterns(cumulative, jump)
    stored = context.recipe.o if context.recipe.o_bar == "fp32" else context.recipe.o_bar
    if patterns is None or stored == "fp32":
        return None
    if stored != "bf16":
        options += ["--to", stored]
    return shlex.join(["bf16forensics", "bits", *patterns, *options])


def _patterns(cumulative: CumulativeTrace, jump: Jump) -> tuple[str, str] | None:
    """FP32 codes of the running sum before the jump and of what is added; None where they are not FP32 numbers."""
    if cumulative.accumulator not in (_PREFIX, _EACH_ADD):
        return None
    # A prefix is rounded afterwards and goes on unrounded; a stored sum goes on as stored.
    running = cumulative.running_hp if cumulative.accumulator == _PREFIX else cumulative.running_lp
    before = float(running[jump.position - 1]) if jump.position else 0.0
    added = float(cumulative.p_bar[jump.position]) * float(cumulative.v[jump.position])
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.array([before, added], dtype=np.float64).astype(np.float32)
    if not bool(np.isfinite(narrow).all()) or narrow.astype(np.float64).tolist() != [before, added]:
        return None
    first, second = (f"0x{code:08X}" for code in narrow.view(np.uint32).tolist())
    return first, second
