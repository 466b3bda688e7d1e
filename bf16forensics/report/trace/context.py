"""What a report of trace-head states beside the trace itself."""

from dataclasses import dataclass

from bf16forensics.load.files import FileFacts
from bf16forensics.recipe.model import Recipe
from bf16forensics.report.environment import Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Where a trace comes from and how it was computed."""

    #: Recipe of the trace, and the precision of its other side: "fp32" or "fp64".
    recipe: Recipe
    reference: str
    #: "amp-bf16" or "fp32" for a captured model; None for records.
    activations: str | None
    inputs: tuple[FileFacts, ...]
    #: "nanogpt", "hf" or "record".
    kind: str
    #: The input in words ("2 layers, 4 heads, head size 64, width 256"), and its mask and scale ("scale 0.125, causal
    #: (bottom-right), no window, no soft-cap").
    shape: str
    geometry: str
    #: Elements of one query vector, and whether the call is causal or has a window: a recipe's tiles depend on both.
    head_size: int
    causal: bool
    #: Format of q, k, v and dO: "bf16", "fp16" or "fp32".
    storage: str
    #: Directory of the case that the trace was made from, as given; None for other inputs.
    case: str | None
    #: The command as run, program name first.
    command: tuple[str, ...]
    environment: Environment
    #: Wall time of the trace, seconds; volatile.
    elapsed_s: float
    #: Whether the case keeps the row, so that a later command finds it there.
    keeps_row: bool = True
