"""The JSON document of a trace-head run: the contract for scripts.

Keys keep their order. Fields may be added within a schema version, never renamed or removed. Everything outside
`environment.volatile` is the same, byte for byte, for repeated runs and for any number of threads.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.evidence.trace.results import CumulativeTrace, HeadTrace
from bf16forensics.report.environment import environment_object
from bf16forensics.report.jsonio import opening, plain
from bf16forensics.report.trace.advice import next_commands
from bf16forensics.report.trace.context import TraceContext
from bf16forensics.report.trace.words import bound_share
from bf16forensics.verdict.words import head_name

#: Most visible keys of a row whose arrays the document holds; an export holds all. Most jumps.
MAX_KEYS = 4096
MAX_JUMPS = 100
_ARRAYS = ("keys", "p_bar", "v", "is_one", "tile_end", "exists", "running_lp", "running_hp", "error", "half_ulp")
_SCALARS = ("feature", "accumulator", "meaning", "walk_recipe", "bound_exceeded", "top_jumps_at_ones", "top_jumps")
_ENDS = ("o_accumulator", "o_lp", "o_hp")


def trace_document(trace: HeadTrace, context: TraceContext) -> dict[str, object]:
    """Builds the document of one trace.

    Args:
        trace: what was found out.
        context: where it comes from.

    Returns:
        Dictionaries, lists, strings, integers, booleans, None and finite floats only; floats that are not finite are
        the strings "nan", "inf" and "-inf".
    """
    built: dict[str, object] = {
        **opening(context.command, tool_version=context.environment.tool_version),
        "environment": environment_object(context.environment, {"elapsed_s": context.elapsed_s}),
        "inputs": _inputs(context),
        "recipe": context.recipe,
        "reference": context.reference,
        "head": _head(trace),
        "tokens": trace.tokens,
        "token": trace.token,
        "traced": trace.traced,
        "cumulative": _cumulative(trace.cumulative),
        "jumps": trace.cumulative.jumps[:MAX_JUMPS],
        "row_jumps": trace.row_jumps,
        "ties": trace.ties,
        "notes": trace.notes,
        "next_commands": next_commands(trace, context),
    }
    return {key: plain(value) for key, value in built.items()}


def _inputs(context: TraceContext) -> dict[str, object]:
    names = "kind activations shape geometry head_size causal storage case".split()
    return {"files": context.inputs, **{name: getattr(context, name) for name in names}}


def _head(trace: HeadTrace) -> dict[str, object]:
    names = (
        "layer head sequences sequences_of_run num_queries num_features delta_err_sum rows positive negative"
    ).split()
    sums = [math.fsum(row[~np.isnan(row)].tolist()) for row in trace.delta_err]
    return {
        "name": head_name(trace.layer, trace.head),
        **{name: getattr(trace, name) for name in names},
        # One sum a sequence: rows without an error of delta count nothing.
        "delta_err_by_sequence": None if math.isnan(trace.delta_err_sum) else sums,
    }


def _cumulative(cumulative: CumulativeTrace) -> dict[str, object]:
    keys = len(cumulative.keys)
    whole = keys <= MAX_KEYS
    return {
        **{name: getattr(cumulative, name) for name in _SCALARS},
        "num_keys": keys,
        "num_ones": int(np.count_nonzero(cumulative.is_one)),
        "num_exist": int(np.count_nonzero(cumulative.exists)),
        "largest_share_of_bound": bound_share(cumulative),
        "extremes": _extremes(cumulative),
        **{name: getattr(cumulative, name) for name in _ENDS},
        "arrays": {name: _listed(getattr(cumulative, name)) for name in _ARRAYS} if whole else None,
    }


def _extremes(cumulative: CumulativeTrace) -> dict[str, object] | None:
    """Where the error is least, where it is largest, and where it ends; None without a finite error."""
    error = cumulative.error
    if not len(error) or not bool(np.isfinite(error).any()):
        return None
    finite = np.isfinite(error)
    places = {
        "least": int(np.argmin(np.where(finite, error, np.inf))),
        "largest": int(np.argmax(np.where(finite, error, -np.inf))),
        "end": len(error) - 1,
    }
    return {
        name: {"position": position, "key": int(cumulative.keys[position]), "error": float(error[position])}
        for name, position in places.items()
    }


def _listed(array: NDArray[Any] | None) -> list[object] | None:
    return None if array is None else list(array.tolist())
