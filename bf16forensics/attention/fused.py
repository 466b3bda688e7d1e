"""The gateway to the fused dual pass: one record through the kernels, to the same rows as the reference gives.

The reference in `dual` is the specification; what is bitwise and what is numerical between the two is written down in
docs/adr/0012-fused-dual-pass.md.

Shapes: H query heads, N queries, M keys, D and E head sizes of q/k and v.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bf16forensics.attention.fused_inputs import fused_inputs
from bf16forensics.attention.fused_recipe import fused_recipe
from bf16forensics.attention.fused_rows import fused_delta, fused_maxima
from bf16forensics.attention.fused_ties import fused_ties
from bf16forensics.attention.result import DualPass, QueryGradients, on_device
from bf16forensics.attention.ties import has_ties
from bf16forensics.attention.tiles import has_edge
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.strict import strict_fp32
from bf16forensics.errors import InputError
from bf16forensics.kernels.fused_types import FusedInputs, FusedRecipe, FusedWishes, QueryStages
from bf16forensics.recipe.model import Recipe

#: One pass at a time: the interpreter patches Triton's language while a kernel runs, and a GPU has no use for two.
_TURN = threading.Lock()


def fused_dual_pass(
    record: AttentionRecord, recipe: Recipe, hp_products: str = "split", lp_products: str = "shared"
) -> DualPass:
    """Runs a record through a recipe and through high precision by the fused kernels.

    Args:
        record: one attention call of one sequence, all of it finite, on a GPU, or on the CPU: then it is copied to the
            current GPU and the result comes back, or the kernels are interpreted. `why_not_geometry` has nothing
            against it.
        recipe: one that has a fused form.
        hp_products: "split": the high-precision product with V takes P-bar in two BF16 terms; "ieee": every product
            is one of IEEE FP32, as it is in any case where q, k and v are not BF16 or the recipe scales them.
        lp_products: "shared": the recipe's product with V is the first of these terms; "own": it has an accumulator
            chain of its own over all keys, as the hardware's kernel has.

    Returns:
        As `dual_pass`. On the GPU [H, N, D] and [H, N, E] are FP32; everything else, and everything on the CPU, is
        float64. `swamped` is looked for in rows whose top key has a probability above 1 - 2^-8 only.

    Raises:
        RecipeError: the recipe has no fused form.
        InputError: a kernel does not fit into the GPU's shared memory.

    Reference: arXiv 2510.04212, section 3.3.1 and equations 1 to 3.
    """
    constants = fused_recipe(recipe, record.q.shape[-1], record.k.shape[1], has_edge(record.geometry))
    with torch.no_grad(), strict_fp32(), _TURN:
        inputs = fused_inputs(record, recipe, ieee=hp_products == "ieee")
        # Triton launches on the current device.
        with torch.cuda.device_of(inputs.q), _fitting(record):
            return on_device(_run(inputs, constants, record, recipe, lp_products), record.q.device)


def _run(
    inputs: FusedInputs, constants: FusedRecipe, record: AttentionRecord, recipe: Recipe, lp_products: str
) -> DualPass:
    from bf16forensics.kernels.dual_forward import dual_forward
    from bf16forensics.kernels.flagged_rows import count_and_anchor
    from bf16forensics.kernels.query_stages import query_stages

    forward = dual_forward(inputs, constants, FusedWishes(lowest=True, own_chain=lp_products == "own"))
    # Rows that are anchored at their top key overwrite their own.
    o_err = forward.o_lp.float() - forward.o_hp
    counts = count_and_anchor(inputs, constants, forward, o_err=o_err, with_keys=has_ties(recipe))
    stages = None if inputs.do is None else query_stages(inputs, constants, forward, counts)
    return DualPass(
        o_lp=forward.o_lp.float(),
        o_hp=forward.o_hp,
        o_err=o_err,
        lse_lp=forward.lse_lp.double(),
        lse_hp=forward.lse_hp.double(),
        maxima=fused_maxima(inputs, forward, counts),
        ties=fused_ties(inputs, counts, record, recipe),
        delta=fused_delta(forward, counts, recipe),
        dq=None if stages is None else _query_gradients(stages),
    )


@contextmanager
def _fitting(record: AttentionRecord) -> Iterator[None]:
    """Says in one line that a kernel needs more of the GPU than there is."""
    from triton.runtime.errors import OutOfResources

    try:
        yield
    except OutOfResources as error:
        raise InputError(
            f"layer {record.layer}: the fused kernels do not fit this GPU at head size {record.q.shape[-1]} ({error}); "
            "use --backend reference"
        ) from error


def _query_gradients(stages: QueryStages) -> QueryGradients:
    return QueryGradients(
        hp=stages.hp,
        consistent=stages.consistent,
        cast_ds=stages.cast_ds,
        lp=stages.lp,
        carrier_hp=stages.carrier_hp,
        carrier_lp=stages.carrier_lp,
    )
