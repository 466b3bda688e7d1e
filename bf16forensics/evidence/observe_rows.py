"""Rows with several maxima, and their keys.

The dual pass counts P-bar = 1 row by row and forgets which keys they were. Here the scores of the rows worth listing
are computed again, in blocks of the same shape as there, so that they come out with the same bits.

Shapes: H query heads, N queries, M keys, R rows and K keys of a block.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from bf16forensics.attention.dual import row_blocks
from bf16forensics.attention.operands import Operands, forward_operands
from bf16forensics.attention.result import RowMaxima
from bf16forensics.attention.scores import Block, LpScores, lp_scores
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.evidence.observe_results import RepeatedRow
from bf16forensics.recipe.model import Recipe

#: Rows of a run that are listed, and keys of a row.
MOST_ROWS = 1000
_MOST_KEYS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRows:
    """Rows of one record in which two or more P-bar are 1 after rounding to BF16."""

    #: int64 [H]: rows, rows with two or more exactly 1 in FP32, most ones in a row.
    rows: np.ndarray
    rows_exact: np.ndarray
    most_ones: np.ndarray
    #: At most 1,000, most ones first.
    listed: tuple[RepeatedRow, ...]


def listing_order(row: RepeatedRow) -> tuple[int, ...]:
    """Most ones first, then by layer, head, query and sequence."""
    return (-row.ones, row.layer, row.head, row.query, row.sequence)


def repeated_rows(record: AttentionRecord, maxima: RowMaxima, rows: torch.Tensor, recipe: Recipe) -> RepeatedRows:
    """Counts and lists the rows with several maxima of one record.

    Args:
        record: the record (finite), on any device.
        maxima: of its dual pass. The scores of its rows are computed again by the reference on the CPU: of a pass on
            another device they are not the same bits, and the gap says so by as much.
        rows: bool [H, N], rows that take part: neither padding nor fully masked nor withheld.
        recipe: recipe of the dual pass; must anchor rows at their maximum.
    """
    ones = (maxima.ones_rounded * rows).cpu()
    exact = (maxima.ones_fp32 * rows).cpu()
    if record.q.device.type != "cpu" and bool((ones > 1).any()):
        record = record.to(torch.device("cpu"))
    heads, queries = (index.numpy() for index in (ones > 1).nonzero(as_tuple=True))
    order = np.lexsort((queries, heads, -ones.numpy()[heads, queries]))[:MOST_ROWS]
    counts, exact_counts = ones.numpy(), exact.numpy()
    listed: list[RepeatedRow] = []
    for head, found, block, scores in _scores(record, recipe, heads[order], queries[order]):
        own = scores.values[0, torch.tensor(found) - block.rows[0]].numpy()
        for query, keys, gap in zip(found, *_top_keys(own, counts[head, found]), strict=True):
            listed.append(
                RepeatedRow(
                    layer=record.layer,
                    head=head,
                    sequence=record.sequence,
                    query=query,
                    ones=int(counts[head, query]),
                    ones_exact=int(exact_counts[head, query]),
                    gap_nats=gap * scores.unit,
                    keys=tuple((keys[:_MOST_KEYS] + block.keys[0]).tolist()),
                    labelled=record.labelled is None or bool(record.labelled[query]),
                )
            )
    return RepeatedRows(
        rows=(ones > 1).sum(1).numpy(),
        rows_exact=(exact > 1).sum(1).numpy(),
        most_ones=ones.amax(1).numpy() if ones.shape[1] else np.zeros(ones.shape[0], np.int64),
        listed=tuple(sorted(listed, key=listing_order)),
    )


def _scores(
    record: AttentionRecord, recipe: Recipe, heads: np.ndarray, queries: np.ndarray
) -> Iterator[tuple[int, list[int], Block, LpScores]]:
    """For each block of the dual pass that holds some of the rows (head, query): its head, those rows, its scores.

    The scores are [1, R, K], R all rows of the block.
    """
    blocks = row_blocks(record, recipe)
    starts = [block.rows[0] for block in blocks]
    by_block: dict[tuple[int, int], list[int]] = {}
    for head, query in zip(heads.tolist(), queries.tolist(), strict=True):
        by_block.setdefault((head, bisect_right(starts, query) - 1), []).append(query)
    operands: Operands | None = None
    last = -1
    for head, number in sorted(by_block):
        if operands is None or head != last:
            operands, last = forward_operands(record, recipe, slice(head, head + 1)), head
        block = blocks[number]
        geometry = replace(record.geometry.for_heads(slice(head, head + 1)), scale=operands.scale)
        bias = geometry.bias_block(block.rows, block.keys)
        q, k = operands.q[:, slice(*block.rows)], operands.k[:, slice(*block.keys)]
        yield head, by_block[head, number], block, lp_scores(q, k, geometry, recipe, block, bias)


def _top_keys(scores: np.ndarray, ones: np.ndarray) -> tuple[list[np.ndarray], list[float]]:
    """The keys of the `ones` largest scores of each row, ascending, and the distance from the largest to the last.

    P-bar never falls as the score grows, so the keys with P-bar = 1 are those with the largest scores.

    Args:
        scores: [R, K].
        ones: int64 [R], 1 to K each.
    """
    most = int(ones.max())
    largest = -np.sort(-np.partition(scores, -most, axis=1)[:, -most:], axis=1)
    last = largest[np.arange(len(ones)), ones - 1]
    place, candidates = np.nonzero(scores >= last[:, None])
    ends = np.searchsorted(place, np.arange(len(ones)), side="right").tolist()
    keys, start = [], 0
    for row, end, count in zip(scores, ends, ones.tolist(), strict=True):
        own, start = candidates[start:end], end
        if len(own) > count:
            # Only if the count was made of other bits than these scores: the largest, and of equal ones the first.
            own = np.sort(own[np.argsort(-row[own], kind="stable")[:count]])
        keys.append(own)
    return keys, (largest[:, 0] - last).astype(np.float64).tolist()
