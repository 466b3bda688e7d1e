"""The geometry of one attention call: visibility of (query, key) pairs, scale, and score modifiers.

Shapes: H query heads, N queries, M keys.
"""

from dataclasses import dataclass, replace

import torch

from bf16forensics.errors import InputError

#: Additive masks at or below the most negative BF16 number count as "not visible" whatever their dtype: adding such a
#: value to any score that a model produces leaves nothing of the key.
_MOST_NEGATIVE_BF16 = -3.3895313892515355e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Which pairs are visible and how a raw product q.k becomes a score.

    The score of a visible pair is `softcap * tanh(scale * q.k / softcap) + bias`. "Causal" aligns bottom-right: query
    i of N sees keys up to i + M - N. `window` W leaves the last W of these, the query's own position included.
    """

    #: Softmax scale.
    scale: float
    #: Bottom-right causal mask.
    causal: bool = True
    #: Number of visible keys of a sliding window, the query's own position included; None for no window.
    window: int | None = None
    #: Soft-cap of the scaled scores; None for none.
    softcap: float | None = None
    #: [M] bool, True where the key is real; None when nothing is padded.
    key_padding: torch.Tensor | None = None
    #: [N] bool, True where the query is real; None when nothing is padded.
    query_padding: torch.Tensor | None = None
    #: [M] int document of each position; pairs of different documents are not visible. Needs N == M.
    document_ids: torch.Tensor | None = None
    #: [H or 1, N, M] bool, True where the pair is visible.
    keep: torch.Tensor | None = None
    #: [H or 1, N, M] floating bias added to the scaled and capped score (ALiBi, relative positions).
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0 or self.scale == float("inf"):
            raise InputError(f"softmax scale must be a positive finite number; got {self.scale}")
        if self.window is not None and self.window < 1:
            raise InputError(f"window must be at least 1 visible key; got {self.window}")
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise InputError(f"softcap must be a positive finite number; got {self.softcap}. Leave it out for no cap")

    def key_range(self, row_start: int, row_end: int, num_queries: int, num_keys: int) -> tuple[int, int]:
        """Smallest [start, end) range of keys that holds every key visible to rows [row_start, row_end).

        Only the causal mask and the window shrink the range; the other masks are applied inside it.
        """
        offset = num_keys - num_queries
        start, end = 0, num_keys
        if self.causal:
            end = min(num_keys, max(row_end + offset, 0))
        if self.window is not None:
            start = max(0, row_start + offset - self.window + 1)
            if not self.causal:
                end = min(num_keys, max(row_end + offset + self.window - 1, 0))
        return min(start, end), end

    def to(self, device: torch.device) -> "Geometry":
        """The same geometry with its masks and its bias on a device."""
        masks = ("key_padding", "query_padding", "document_ids", "keep", "bias")
        known = {name: mask for name in masks if (mask := getattr(self, name)) is not None}
        return replace(self, **{name: mask.to(device) for name, mask in known.items()}) if known else self

    def visible(
        self,
        rows: tuple[int, int],
        keys: tuple[int, int],
        num_queries: int,
        num_keys: int,
        device: torch.device | None = None,
    ) -> torch.Tensor | None:
        """Visibility of the pairs rows x keys.

        Args:
            rows: [start, end) of the queries.
            keys: [start, end) of the keys.
            num_queries: N.
            num_keys: M.
            device: where the masks of the geometry lie and the result is wanted; None for the CPU.

        Returns:
            bool [1 or H, rows, keys], or None when every pair is visible.
        """
        masks: list[torch.Tensor] = []
        position = torch.arange(rows[0], rows[1], device=device)[:, None] + (num_keys - num_queries)
        key = torch.arange(keys[0], keys[1], device=device)[None, :]
        if self.causal and keys[1] > rows[0] + (num_keys - num_queries) + 1:
            masks.append(key <= position)
        if self.window is not None:
            masks.append(key > position - self.window)
            if not self.causal:
                masks.append(key < position + self.window)
        if self.key_padding is not None:
            masks.append(self.key_padding[keys[0] : keys[1]][None, :])
        if self.query_padding is not None:
            masks.append(self.query_padding[rows[0] : rows[1]][:, None])
        if self.document_ids is not None:
            masks.append(self.document_ids[rows[0] : rows[1]][:, None] == self.document_ids[keys[0] : keys[1]][None, :])
        combined: torch.Tensor | None = None
        for mask in masks:
            combined = mask if combined is None else combined & mask
        if combined is not None:
            # Padding alone is one row or one column, which a caller would count as such.
            combined = combined.expand(rows[1] - rows[0], keys[1] - keys[0])[None]
        if self.keep is not None:
            block = self.keep[:, rows[0] : rows[1], keys[0] : keys[1]]
            combined = block if combined is None else combined & block
        return combined

    def hide(self, scores: torch.Tensor, rows: tuple[int, int], num_queries: int, first_key: int, num_keys: int) -> int:
        """Sets the scores of invisible pairs to -inf, in place.

        Args:
            scores: [H, rows, keys] scores of the queries `rows` and the keys from `first_key` on, on the masks' device.
            rows: [start, end) of the queries.
            num_queries: N.
            first_key: first key of the block.
            num_keys: M.

        Returns:
            Column of the block before which every pair is visible; the number of columns when all are.
        """
        end = first_key + scores.shape[-1]
        start = first_key
        if self._only_causal():
            # Every row of the block sees the keys up to the first row's own: only what follows needs a mask.
            start = min(max(rows[0] + num_keys - num_queries + 1, first_key), end)
        visible = None if start == end else self.visible(rows, (start, end), num_queries, num_keys, scores.device)
        if visible is None:
            return end - first_key
        scores[..., start - first_key :].masked_fill_(~visible, -torch.inf)
        return start - first_key

    def _only_causal(self) -> bool:
        others = (self.window, self.key_padding, self.query_padding, self.document_ids, self.keep)
        return self.causal and all(other is None for other in others)

    def for_heads(self, span: slice) -> "Geometry":
        """The same geometry for a range of query heads; only masks given by head change."""
        keep, bias = (mask if mask is None or mask.shape[0] == 1 else mask[span] for mask in (self.keep, self.bias))
        return self if keep is self.keep and bias is self.bias else replace(self, keep=keep, bias=bias)

    def bias_block(self, rows: tuple[int, int], keys: tuple[int, int]) -> torch.Tensor | None:
        """The additive bias of the pairs rows x keys, [H or 1, rows, keys], or None."""
        if self.bias is None:
            return None
        return self.bias[:, rows[0] : rows[1], keys[0] : keys[1]]


def split_additive_mask(mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Separates an additive mask into visibility and bias.

    An entry hides its pair when it is -inf, or at or below the most negative finite number of its own dtype or of
    BF16 (adding two such planes overflows to -inf, and casting one from FP32 to BF16 does too: all mean the same).

    Args:
        mask: floating tensor of any shape.

    Returns:
        (keep, bias): bool of the same shape or None if nothing is hidden; floating of the same shape with hidden
        entries set to 0, or None if no visible entry is other than 0.

    Raises:
        InputError: an entry is NaN or +inf.
    """
    if torch.isnan(mask).any() or torch.isposinf(mask).any():
        raise InputError("additive mask holds NaN or +inf; use finite numbers, or -inf to hide a pair")
    lowest = max(torch.finfo(mask.dtype).min, _MOST_NEGATIVE_BF16)
    hidden = mask <= lowest
    bias = mask.masked_fill(hidden, 0.0)
    return (None if not hidden.any() else ~hidden), (None if not (bias != 0).any() else bias)
