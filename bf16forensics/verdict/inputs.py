"""Findings about the inputs: BF401 to BF404."""

from collections.abc import Sequence

from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.verdict.findings import Finding
from bf16forensics.verdict.shared import Pair, finding, names_of
from bf16forensics.verdict.words import count, head_name, listing

#: Tensors that a sentence names.
_NAMES = 5


def input_findings(result: LocalizeResult, pairs: Sequence[Pair]) -> list[Finding]:
    """One finding a code, whatever the number of heads.

    Args:
        result: the run.
        pairs: heads and verdicts; heads are named in (layer, head) order here, as in the input.
    """
    heads = sorted((head for head, _ in pairs), key=lambda head: (head.layer, head.head))
    found = []
    damaged = [head for head in heads if head.nonfinite]
    if damaged:
        places = [f"{head_name(head.layer, head.head)} {place}" for head in damaged for place in head.nonfinite]
        found.append(
            finding(
                "BF401",
                message=f"NaN or Inf in the input of {count(len(damaged), 'head')}: {listing(places, _NAMES)}",
                observed=f"{count(len(places), 'tensor')} with a NaN or Inf; the first position of each is named",
                inferred="these heads cannot be judged and are left out of every family of tests",
                next_command="repair or leave out the batch or tensor named",
                heads=damaged,
            )
        )
    empty = [head for head in heads if head.spectrum is not None and head.spectrum.w_q_all_zero]
    if empty:
        found.append(
            finding(
                "BF402",
                message=f"W_Q is zero everywhere in {count(len(empty), 'head')}: {names_of(empty)}",
                observed="largest singular value 0",
                inferred="all scores of the head are equal and all keys share the maximum: pruned, or not trained yet",
                next_command="check that the checkpoint is the one that was trained",
                heads=empty,
            )
        )
    if result.no_output_head:
        found.append(
            finding(
                "BF404",
                message="the checkpoint has no output head: no loss, no dO, forward evidence only",
                observed=result.no_gradient or "no output head",
                inferred="delta and dW_Q of every head cannot be judged; a random head would give a false dO",
                next_command="give the checkpoint with its lm_head, or one whose config ties it to the embedding",
            )
        )
    if result.unused_tensors:
        number = count(len(result.unused_tensors), "attention tensor")
        found.append(
            finding(
                "BF403",
                message=f"{number} not applied: {listing(result.unused_tensors, _NAMES)}",
                observed="present in the input, not part of the attention that was analysed",
                inferred="if the model applies them, its attention is another one than the one judged here",
                next_command="check the names in unused_tensors of the JSON document",
            )
        )
    return found
