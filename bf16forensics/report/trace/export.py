"""The export of a trace: every array of it in one safetensors file of NumPy's own types."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16forensics.errors import InputError
from bf16forensics.evidence.trace.results import FeatureContribution, HeadTrace
from bf16forensics.report.array_file import array_bytes
from bf16forensics.report.row_trace import RowTrace, row_arrays, row_metadata
from bf16forensics.report.trace.context import TraceContext
from bf16forensics.report.whole_file import check_target, write_whole

_SUFFIX = ".safetensors"
#: Fields of a feature; arrays along the keys, with their types.
_FEATURES = ("do", "o_lp", "o_hp", "o_err", "o_err_ulp", "contribution")
_CUMULATIVE: dict[str, Any] = {
    "keys": np.int64,
    "p_bar": np.float32,
    "v": np.float32,
    "is_one": np.bool_,
    "tile_end": np.bool_,
    "exists": np.bool_,
    "running_lp": np.float64,
    "running_hp": np.float64,
    "error": np.float64,
}


def check_export_target(path: Path, *, force: bool) -> None:
    """Refuses an export that could not be written at the end; call it before a long run.

    Raises:
        InputError: the suffix is not .safetensors, the file may not be replaced, or its folder not be written.
    """
    if path.suffix.lower() != _SUFFIX:
        raise InputError(f"{path} does not end in {_SUFFIX}, the one format of an export; name it so")
    check_target(path, force=force, what="export")


def write_export(path: Path, trace: HeadTrace, rows: RowTrace, context: TraceContext, *, force: bool) -> None:
    """Writes everything that a trace holds; `read_row_trace` reads the row back. The same trace gives the same bytes.

    Arrays: those of a row file; "delta_err" F64 [S, N] with "sequences" I64 [S]; "features.*" of the token, largest
    contribution first (absent without dO); "cumulative.*" of the traced feature, one entry a visible key, with
    "cumulative.half_ulp" where a bound exists; "jumps.position", "jumps.size"; "v_all" F32.

    Args:
        path: the file; its parents are made.
        trace: what was found out.
        rows: the walks of the same row.
        context: where the trace comes from.
        force: replace an existing file.

    Raises:
        InputError: as for `check_export_target`; or the file cannot be written.
    """
    check_export_target(path, force=force)
    write_whole(path, array_bytes(_arrays(trace, rows), _metadata(trace, rows, context)))


def _arrays(trace: HeadTrace, rows: RowTrace) -> dict[str, NDArray[Any]]:
    cumulative = trace.cumulative
    arrays = row_arrays(rows)
    arrays["delta_err"] = np.asarray(trace.delta_err, dtype=np.float64)
    arrays["sequences"] = np.array(trace.sequences, dtype=np.int64)
    arrays["v_all"] = np.asarray(trace.v_all, dtype=np.float32)
    for name, kind in _CUMULATIVE.items():
        arrays[f"cumulative.{name}"] = np.asarray(getattr(cumulative, name), dtype=kind)
    if cumulative.half_ulp is not None:
        arrays["cumulative.half_ulp"] = np.asarray(cumulative.half_ulp, dtype=np.float64)
    arrays["jumps.position"] = np.array([jump.position for jump in cumulative.jumps], dtype=np.int64)
    arrays["jumps.size"] = np.array([jump.size for jump in cumulative.jumps], dtype=np.float64)
    if trace.token is not None:
        features: tuple[FeatureContribution, ...] = trace.token.features
        arrays["features.feature"] = np.array([item.feature for item in features], dtype=np.int64)
        for name in _FEATURES:
            arrays[f"features.{name}"] = np.array([getattr(item, name) for item in features], dtype=np.float64)
    return arrays


def _metadata(trace: HeadTrace, rows: RowTrace, context: TraceContext) -> dict[str, str]:
    cumulative = trace.cumulative
    return {
        **row_metadata(rows),
        "tool": f"bf16forensics {context.environment.tool_version}",
        "recipe": context.recipe.name,
        "reference": context.reference,
        "storage": context.storage,
        "accumulator": cumulative.accumulator,
        "meaning": cumulative.meaning,
        "walk_recipe": cumulative.walk_recipe,
        "feature": str(cumulative.feature),
    }
