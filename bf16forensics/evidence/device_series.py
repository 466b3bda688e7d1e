"""Signed per-row quantities of a layer, streamed on the device that computed them.

The same sums as `SignedSeries`, of several quantities at once: a row never leaves its device, only sums do.

Shapes: Q quantities, F heads, N rows of a sequence.
"""

import torch

from bf16forensics.evidence.host import on_host
from bf16forensics.evidence.series import SeriesTotals, kept_rows


class DeviceSeries:
    """Accumulates Q signed quantities for a fixed set of heads."""

    def __init__(self, num_quantities: int, num_heads: int, max_rows: int, device: torch.device) -> None:
        """Args: num_quantities Q; num_heads F; max_rows as for `SignedSeries`; device of everything added."""
        self._keep = kept_rows(max_rows)
        shape = (num_quantities, num_heads)
        self._device = device
        self._largest = torch.zeros((*shape, 0), dtype=torch.float64, device=device)
        self._by_token = torch.zeros((*shape, 0), dtype=torch.float64, device=device)
        #: Sum, sum of squares, sum of magnitudes.
        self._moments = torch.zeros((3, *shape), dtype=torch.float64, device=device)
        self._signs = torch.zeros((3, *shape), dtype=torch.int64, device=device)
        self._rows = torch.zeros(num_heads, dtype=torch.int64, device=device)
        self._by_sequence: list[torch.Tensor] = []

    def add(self, values: torch.Tensor, rows: torch.Tensor, floor: torch.Tensor) -> None:
        """Adds one sequence.

        Args:
            values: [Q, F, N] float64, 0 where `rows` is False.
            rows: [F, N] bool, rows that count.
            floor: [F, N] |value| up to which a row's sign does not count.
        """
        values, rows, floor = (t.to(self._device) for t in (values, rows, floor))
        sizes = values.abs()
        sums = torch.stack([values, values.square(), sizes]).sum(-1)
        self._moments += sums
        self._by_sequence.append(sums[0])
        self._rows += rows.sum(-1)
        self._signs += (torch.stack([values > floor, values < -floor, sizes <= floor]) & rows).sum(-1)
        missing = values.shape[-1] - self._by_token.shape[-1]
        if missing > 0:
            self._by_token = torch.nn.functional.pad(self._by_token, (0, missing))
        self._by_token[..., : values.shape[-1]] += values
        pool = torch.cat([self._largest, values], dim=-1)
        order = pool.abs().topk(min(self._keep, pool.shape[-1]), dim=-1).indices
        self._largest = pool.gather(-1, order)

    def totals(self) -> tuple[SeriesTotals, ...]:
        """The totals of each quantity so far, in one transfer."""
        found = on_host(
            {
                "largest": self._largest,
                "by_token": self._by_token,
                "moments": self._moments,
                "signs": self._signs,
                "rows": self._rows,
                "by_sequence": torch.stack(self._by_sequence),
            }
        )
        return tuple(
            SeriesTotals(
                rows=found["rows"],
                total=found["moments"][0, index],
                square=found["moments"][1, index],
                absolute=found["moments"][2, index],
                signs=found["signs"][:, index].T,
                by_sequence=tuple(found["by_sequence"][:, index]),
                by_token=found["by_token"][index],
                largest=found["largest"][index],
            )
            for index in range(self._moments.shape[1])
        )
