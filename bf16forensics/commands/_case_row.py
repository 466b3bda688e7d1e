"""One row of a head as a case keeps it, computed where the case does not hold it."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from bf16forensics.investigate.trace import TracedHead
    from bf16forensics.report.row_trace import RowTrace


def row_trace_of(traced: "TracedHead") -> "RowTrace":
    """The traced row as a case keeps it."""
    import numpy as np

    from bf16forensics.report.row_trace import RowTrace

    row = traced.result.traced
    return RowTrace(
        layer=traced.result.layer,
        head=traced.result.head,
        sequence=row.sequence,
        token=row.token,
        step=row.step,
        run=traced.run_walk,
        ascending=traced.ascending,
        o_hp=np.array(traced.o_hp, dtype=np.float64),
    )


def trace_row_of_case(directory: Path, layer: int, head: int, sequence: int, token: int) -> "RowTrace":
    """Computes one row of a head of a case by the case's own recipe, and keeps it there where that is possible.

    Args:
        directory: the case.
        layer: layer of the head, 0-based.
        head: the head.
        sequence: as numbered in the run.
        token: the query.

    Raises:
        InputError: not a case; a number out of range; a row that sees no key; tensors that are missing, changed or
            not finite.
    """
    from bf16forensics.commands._case import open_case
    from bf16forensics.commands._trace_input import case_input
    from bf16forensics.investigate.trace import TraceRequest, trace_head
    from bf16forensics.report.case import write_row_trace_into_case

    case = open_case(directory)
    found = case_input(case, layer, head, sequence=sequence)
    request = TraceRequest(
        layer=layer,
        head=head,
        head_of_record=found.head_of_source,
        recipe=case.recipe,
        reference=case.reference,
        sequence=sequence,
        token=token,
        rank=False,
    )
    row = row_trace_of(trace_head(found.source, request))
    # Nothing is lost where the case cannot be written: the row is computed again next time.
    with suppress(InputError):
        write_row_trace_into_case(directory, row)
    return row
