"""The gradients of every sequence on the device that computed them, while they fit there.

Shapes: F heads of the store, H heads of one layer, n sequences, D head size, C width, S recorded steps.
"""

import numpy as np
import torch

from bf16forensics.evidence.gradient import Matrices, SummedParts
from bf16forensics.evidence.gradient_products import MEAN_PARTS, HeadGrams, HeadProducts, StepSpan
from bf16forensics.evidence.host import on_host
from bf16forensics.evidence.store import MEMORY_BUDGET_BYTES, GradientStore

#: Share of the free memory of a GPU that gradients may take.
_SHARE = 4
#: Bytes of float64 gradients worked on at once.
_BYTES_AT_ONCE = 512 * 2**20


class DeviceGradientStore:
    """float32 [F, n, D * C] for each kind of `GradientStore.KINDS`, on a device."""

    def __init__(self, num_heads: int, max_sequences: int, size: int, device: torch.device) -> None:
        """Args: num_heads F; max_sequences the most that will be added; size D * C; device that holds them."""
        shape = (len(GradientStore.KINDS), num_heads, max_sequences, size)
        self._data = torch.empty(shape, dtype=torch.float32, device=device)

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._data.device

    @staticmethod
    def fits(num_heads: int, max_sequences: int, size: int, device: torch.device) -> bool:
        """Whether so many gradients leave most of what is free on a device to others."""
        needed = 4 * len(GradientStore.KINDS) * num_heads * max_sequences * size
        budget = MEMORY_BUDGET_BYTES
        if device.type == "cuda":
            budget = torch.cuda.mem_get_info(device)[0] // _SHARE
        return needed <= budget

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor beside the gradients, not filled."""
        return torch.empty(shape, dtype=torch.float32, device=self._data.device)

    def place(self, values: Matrices) -> torch.Tensor:
        """Arrays or tensors as tensors beside the gradients."""
        known = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
        return known.to(self._data.device)

    def put(self, heads: slice, sequence: int, hp: Matrices, defect: Matrices, total: Matrices) -> None:
        """Stores the gradients [H, D, C] of one sequence for a range of heads."""
        for index, values in enumerate((hp, defect, total)):
            self._data[index, heads, sequence] = self.place(values).flatten(1)

    def means(self, kinds: tuple[str, ...], heads: slice, num_sequences: int) -> torch.Tensor:
        """float64 [kinds, H, D * C]: mean over sequences."""
        chosen = [self._data[GradientStore.KINDS.index(kind), heads, :num_sequences] for kind in kinds]
        return torch.stack([values.mean(1, dtype=torch.float64) for values in chosen])

    def products(
        self,
        heads: slice,
        num_sequences: int,
        sums: SummedParts,
        key_means: np.ndarray,
        steps: tuple[StepSpan, ...],
    ) -> tuple[list[HeadGrams], list[HeadProducts]]:
        """Inner products and lengths of the heads of one layer, all of them float64 sums.

        Args:
            heads: the layer's heads in the store.
            num_sequences: n, at least one.
            sums: the layer's sums, as tensors on the device.
            key_means: float64 [H, D] mean key as each head's W_Q sees it.
            steps: recorded steps to be listed.
        """
        weights = _step_weights(steps, num_sequences)
        longest = max(num_sequences, len(steps), 1) * self._data.shape[-1]
        at_once = max(1, _BYTES_AT_ONCE // (8 * len(GradientStore.KINDS) * longest))
        keys = self.place(key_means)
        grams: list[HeadGrams] = []
        products: list[HeadProducts] = []
        for start in range(heads.start, heads.stop, at_once):
            some = slice(start, min(start + at_once, heads.stop))
            own = slice(some.start - heads.start, some.stop - heads.start)
            values = self._data[:, some, :num_sequences].double()
            found = on_host(_figures(values, _own(sums, own), keys[own], self.place(weights)))
            for index in range(some.stop - some.start):
                of_head = {name: figures[index] for name, figures in found.items() if name in _GRAMS}
                grams.append(HeadGrams(**of_head))
                products.append(_head(found, index, len(steps)))
        return grams, products


_GRAMS = ("hp", "defect", "total", "hp_defect", "hp_total")


def _step_weights(steps: tuple[StepSpan, ...], num_sequences: int) -> np.ndarray:
    """float64 [S, n]: what makes the mean over a step's sequences."""
    weights = np.zeros((len(steps), num_sequences))
    for row, span in zip(weights, steps, strict=True):
        row[list(span.sequences)] = 1.0 / len(span.sequences)
    return weights


def _own(sums: SummedParts, heads: slice) -> dict[str, torch.Tensor]:
    names = ("full", "scores", "cast_ds", "cast_dq", "direction", "weight_sum", "weight_square_sum")
    return {name: torch.as_tensor(getattr(sums, name)[heads]).double() for name in names}


def _figures(
    values: torch.Tensor, sums: dict[str, torch.Tensor], keys: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What `HeadGrams` and `HeadProducts` hold, of H heads: matrices [H, n, n], figures with H as their last axis."""
    hp, defect, total = values
    n = values.shape[2]
    mean_hp, mean_defect, mean_total = values.mean(2)
    parts = {name: sums[name].flatten(1) / n for name in ("full", "scores", "cast_ds", "cast_dq")}
    parts |= {"defect": mean_defect, "total": mean_total}
    means = torch.stack([parts[name] for name in MEAN_PARTS])
    hp_and_defect = values[:2].unflatten(-1, (keys.shape[1], -1))
    along = torch.matmul(keys[:, None, None, :], hp_and_defect)
    return {
        "hp": hp @ hp.mT,
        "defect": defect @ defect.mT,
        "total": total @ total.mT,
        "hp_defect": hp @ defect.mT,
        "hp_total": hp @ total.mT,
        "norm": torch.linalg.vector_norm(mean_hp, dim=-1),
        "lengths": torch.linalg.vector_norm(means, dim=-1),
        "along_total": (means * mean_total).sum(-1),
        "flat": along.square().sum((2, 3, 4)),
        "power": values[:2].square().sum((2, 3)),
        "key_square": keys.square().sum(-1),
        "coherent": defect.sum(1).square().sum(-1),
        "coherent_direction": sums["direction"].square().sum((1, 2)),
        "weight_sum": sums["weight_sum"],
        "weight_square_sum": sums["weight_square_sum"],
        "steps": torch.linalg.vector_norm(weights @ values, dim=-1).transpose(1, 2),
    }


def _head(found: dict[str, np.ndarray], index: int, num_steps: int) -> HeadProducts:
    own = {name: figures[..., index].tolist() for name, figures in found.items() if name not in _GRAMS}
    return HeadProducts(
        norm=own["norm"],
        lengths=dict(zip(MEAN_PARTS, own["lengths"], strict=True)),
        along_total=dict(zip(MEAN_PARTS, own["along_total"], strict=True)),
        flat_hp=(own["flat"][0], own["power"][0]),
        flat_defect=(own["flat"][1], own["power"][1]),
        key_square=own["key_square"],
        coherent=own["coherent"],
        coherent_direction=own["coherent_direction"],
        weight_sum=own["weight_sum"],
        weight_square_sum=own["weight_square_sum"],
        steps=tuple((own["steps"][0][i], own["steps"][1][i], own["steps"][2][i]) for i in range(num_steps)),
    )
