"""A record as the fused kernels take it, and which of its pairs are visible.

Shapes: H query heads, G key/value heads, N queries, M keys, D and E head sizes of q/k and v.
"""

import torch

from bf16forensics.attention.kernel_rounding import is_interpreting
from bf16forensics.capture.record import AttentionRecord
from bf16forensics.geometry.geometry import Geometry
from bf16forensics.kernels.fused_types import FusedInputs
from bf16forensics.recipe.model import Recipe

#: Largest head size of the kernels.
MOST_HEAD_SIZE = 256
#: Numbers of a group that no real query or key has; a padded query sees no padded key.
_PADDED_KEY, _PADDED_QUERY = -3, -4
#: Pairs whose visibility is looked at together.
_PAIRS = 2**26


def why_not_geometry(record: AttentionRecord) -> str | None:
    """One clause on what of a call the fused pass does not have, with the field's name; None for nothing."""
    geometry = record.geometry
    if geometry.softcap is not None:
        return f"the fused pass has no soft-cap (softcap {geometry.softcap:g})"
    if geometry.bias is not None:
        return "the fused pass has no additive bias (bias)"
    largest = max(record.q.shape[-1], record.v.shape[-1])
    if largest > MOST_HEAD_SIZE:
        return f"the fused pass has head sizes up to {MOST_HEAD_SIZE} (head_size {largest})"
    return None


def kernel_device(record: AttentionRecord) -> torch.device:
    """Where the kernels run for a record: on its own GPU or the current one; on the CPU where they are interpreted."""
    if record.q.is_cuda or is_interpreting():
        return record.q.device
    return torch.device("cuda", torch.cuda.current_device())


def fused_inputs(record: AttentionRecord, recipe: Recipe, *, ieee: bool) -> FusedInputs:
    """The operands and masks of a record on the device of the kernels.

    BF16 products take what BF16 holds: records stored otherwise, and recipes that scale q and k, are multiplied in
    IEEE FP32 whatever was asked for.

    Args:
        record: one attention call; `why_not_geometry` has nothing against it.
        recipe: which operands are multiplied, and whether there is a backward pass.
        ieee: whether every product is to be one of IEEE FP32.
    """
    device = kernel_device(record)
    ieee = ieee or record.storage != "bf16" or recipe.scale_placement == "operands"
    dtype = torch.float32 if ieee or device.type == "cpu" else torch.bfloat16

    def moved(values: torch.Tensor) -> torch.Tensor:
        return values.to(device=device, dtype=dtype).contiguous()

    geometry = record.geometry
    groups = _groups(geometry, record.q.shape[1], record.k.shape[1], device)
    keep = geometry.keep
    return FusedInputs(
        q=moved(record.q),
        k=moved(record.k),
        v=moved(record.v),
        do=None if record.do is None or recipe.passes == "forward" else moved(record.do),
        scale=geometry.scale,
        causal=geometry.causal,
        window=geometry.window or 0,
        q_group=None if groups is None else groups[0],
        k_group=None if groups is None else groups[1],
        keep=None if keep is None else keep.to(device=device, dtype=torch.uint8).contiguous(),
        ieee=ieee,
    )


def _groups(
    geometry: Geometry, num_queries: int, num_keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Documents and padding as one number a query and one a key, equal where they may see each other."""
    key_padding, query_padding, documents = geometry.key_padding, geometry.query_padding, geometry.document_ids
    if key_padding is None and query_padding is None and documents is None:
        return None
    if documents is None:
        queries = torch.zeros(num_queries, dtype=torch.int32, device=device)
        keys = torch.zeros(num_keys, dtype=torch.int32, device=device)
    else:
        # Ids may be any 64-bit numbers.
        dense = torch.unique(documents, return_inverse=True)[1].to(device=device, dtype=torch.int32)
        queries, keys = dense.clone(), dense.clone()
    if key_padding is not None:
        keys.masked_fill_(~key_padding.to(device), _PADDED_KEY)
    if query_padding is not None:
        queries.masked_fill_(~query_padding.to(device), _PADDED_QUERY)
    return queries, keys


def visible_pairs(inputs: FusedInputs, rows: torch.Tensor, heads: torch.Tensor | None = None) -> torch.Tensor:
    """Which keys some queries see.

    Args:
        inputs: of the call.
        rows: int64 [..., R] queries; leading axes are those of `heads`.
        heads: int64 [...] heads of the rows; None for all heads at once, which gives one more leading axis of 1 or H.

    Returns:
        bool [..., R, M].
    """
    num_queries, num_keys = inputs.q.shape[1], inputs.k.shape[1]
    position = (rows + (num_keys - num_queries))[..., None]
    key = torch.arange(num_keys, device=rows.device)
    visible = torch.ones((*rows.shape, num_keys), dtype=torch.bool, device=rows.device)
    if inputs.causal:
        visible &= key <= position
    if inputs.window:
        visible &= key > position - inputs.window
        if not inputs.causal:
            visible &= key < position + inputs.window
    if inputs.q_group is not None and inputs.k_group is not None:
        visible &= inputs.q_group[rows][..., None] == inputs.k_group
    if inputs.keep is None:
        return visible if heads is not None else visible[None]
    if heads is None:
        return visible & (inputs.keep[:, rows] != 0)
    plane = heads if inputs.keep.shape[0] > 1 else torch.zeros_like(heads)
    return visible & (inputs.keep[plane[..., None], rows] != 0)


def seen_keys(inputs: FusedInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """How many keys each query sees, and which one first (0 where it sees none).

    Returns:
        int64 [1 or H, N] each.
    """
    num_queries, num_keys = inputs.q.shape[1], inputs.k.shape[1]
    row = torch.arange(num_queries, device=inputs.q.device)
    if inputs.q_group is None and inputs.keep is None:
        position = row + (num_keys - num_queries)
        end, start = torch.full_like(row, num_keys), torch.zeros_like(row)
        if inputs.causal:
            end = (position + 1).clamp(0, num_keys)
        if inputs.window:
            start = (position - inputs.window + 1).clamp(0, num_keys)
            if not inputs.causal:
                end = (position + inputs.window).clamp(0, num_keys)
        count = (end - start).clamp(min=0)
        return count[None], (start * (count > 0))[None]
    planes = 1 if inputs.keep is None else inputs.keep.shape[0]
    found = []
    for some in row.split(max(1, _PAIRS // (planes * max(num_keys, 1)))):
        visible = visible_pairs(inputs, some)
        found.append((visible.sum(-1), visible.to(torch.uint8).argmax(-1)))
    counts, first = zip(*found, strict=True)
    return torch.cat(counts, -1), torch.cat(first, -1)
