"""Options that mean the same in every command."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class FailOn(StrEnum):
    """Severity from which findings make the exit code 1."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Reference(StrEnum):
    """Precision of the high-precision side."""

    FP32 = "fp32"
    FP64 = "fp64"


class Backend(StrEnum):
    """What computes the dual pass."""

    AUTO = "auto"
    REFERENCE = "reference"
    TRITON = "triton"


class HpProducts(StrEnum):
    """How the fused pass takes the high-precision product with V."""

    SPLIT = "split"
    IEEE = "ieee"


class LpProducts(StrEnum):
    """Where the fused pass takes the recipe's product with V from."""

    SHARED = "shared"
    OWN = "own"


class Activations(StrEnum):
    """What the captured model computes in."""

    AMP_BF16 = "amp-bf16"
    FP32 = "fp32"


class Device(StrEnum):
    """Where a captured model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Layout(StrEnum):
    """Axis order of raw tensors: batch, head, time, dim."""

    BHTD = "bhtd"
    BTHD = "bthd"


class Storage(StrEnum):
    """Format in which the implementation holds q, k, v and dO."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


JsonFlag = Annotated[bool, typer.Option("--json", help="Write one JSON document to standard output.")]

ForceFlag = Annotated[bool, typer.Option("--force", help="Replace an output that already exists.")]

OutputDir = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="CASE", help="Directory to write the case to.", show_default=False),
]

FailOnOption = Annotated[
    FailOn, typer.Option("--fail-on", help="Lowest severity of a finding that makes the exit code 1.")
]

# -- what computes --------------------------------------------------------------------------------------------------

BackendOption = Annotated[
    Backend, typer.Option(help="What computes the dual pass: the fused kernels (triton) or the reference.")
]

HpProductsOption = Annotated[
    HpProducts | None,
    typer.Option(help="Fused pass: P-bar in two BF16 terms, or FP32 products (default split).", show_default=False),
]

LpProductsOption = Annotated[
    LpProducts | None,
    typer.Option(
        help="Fused pass: the recipe's PV from the first term, or its own chain (default shared).", show_default=False
    ),
]

# -- a checkpoint and its recorded batch --------------------------------------------------------------------------

BatchOption = Annotated[
    Path | None,
    typer.Option(help="Recorded batch: token file, or tensors of ids.", show_default=False),
]

IndicesOption = Annotated[
    Path | None,
    typer.Option(help="Index file: one line of window starts a step.", show_default=False),
]

LinesOption = Annotated[
    str | None,
    typer.Option(metavar="A:B", help="Lines of the index file, 0-based, B excluded."),
]

SequencesOption = Annotated[
    int | None, typer.Option(min=1, help="First N sequences of each line or record.", show_default=False)
]

FirstStepOption = Annotated[
    int | None,
    typer.Option(help="Step of line 0; default is the checkpoint's + 1."),
]

NumHeadsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Heads, for a bare state dict that does not say."),
]

AllowBinFlag = Annotated[
    bool, typer.Option("--allow-bin", help="Read pytorch_model.bin where a directory has no safetensors.")
]

ActivationsOption = Annotated[Activations, typer.Option(help="What the captured model computes in.")]

DeviceOption = Annotated[
    Device, typer.Option(help="Where the captured model runs; auto: on the GPU where it computes the dual pass.")
]

# -- a record -----------------------------------------------------------------------------------------------------

RecordOption = Annotated[
    Path | None,
    typer.Option(help="q, k, v, do in one file or folder, instead of CKPT."),
]

LayoutOption = Annotated[Layout | None, typer.Option(help="Axis order of q, k, v, do.", show_default=False)]

StorageOption = Annotated[
    Storage | None,
    typer.Option("--dtype", help="Storage format of q, k, v, do (default bf16)."),
]

CausalFlag = Annotated[bool, typer.Option("--causal/--no-causal", help="Bottom-right causal mask.")]

WindowOption = Annotated[int | None, typer.Option(help="Visible keys, the query's own included.")]

SoftcapOption = Annotated[float | None, typer.Option(help="Soft-cap of the scores.")]

ScaleOption = Annotated[float | None, typer.Option(help="Softmax scale (default 1/sqrt(D)).")]
