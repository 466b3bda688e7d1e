"""Where W_Q and W_K of each head live, read from the graph between a projection's output and the attention call.

No table of families: the derivative of q (or k) by the output of each linear layer of the attention module is taken,
scaled by another power of two for each head. Scaling by a power of two is exact, so a column of the output that only
one head reads carries exactly that head's factor, whatever norm, rotation or reordering lies between, and a column
that several heads or positions read does not. A fused, transposed or interleaved layout is found like a plain one,
and a layout that is not per head is found out.

Shapes: H heads, N positions, D head size, F outputs and C inputs of a projection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bf16forensics.capture.hf.library import library

#: Heads are told by factors 2^0 to 2^15, one hexadecimal digit of their number at a time.
_DIGIT_BITS = 4
#: Operations that move elements and compute nothing, by the names of their derivatives.
_MOVES = frozenset(
    "AccumulateGrad AliasBackward0 CloneBackward0 PermuteBackward0 ReshapeAliasBackward0 SelectBackward0 "
    "SliceBackward0 SplitBackward0 SplitWithSizesBackward0 SqueezeBackward0 SqueezeBackward1 TransposeBackward0 "
    "UnsafeSplitBackward0 UnsafeViewBackward0 UnsqueezeBackward0 ViewBackward0".split()
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Projection:
    """A linear layer whose output columns belong to heads."""

    #: Name of the module in the model.
    module: str
    #: int64 [H, D] columns of its output that each head reads, ascending.
    columns: torch.Tensor
    #: Whether its weight is stored [in, out].
    transposed: bool
    #: Width C of its input.
    width: int

    def weight_by_head(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[H, D, C] FP32, out x in, whatever the orientation in the file."""
        stored = weights[f"{self.module}.weight"]
        flat = self.columns.flatten()
        rows = stored[:, flat].T if self.transposed else stored[flat]
        return rows.float().reshape(*self.columns.shape, -1)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a plain linear layer: torch's, or the one of GPT-2 that stores [in, out]."""
    return type(module).forward in (torch.nn.Linear.forward, library("pytorch_utils").Conv1D.forward)


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether a linear layer stores its weight [in, out]."""
    return not isinstance(module, torch.nn.Linear)


def linear_shape(module: torch.nn.Module) -> tuple[int, int]:
    """(F outputs, C inputs) of a linear layer."""
    weight = module.get_parameter("weight")
    rows, columns = weight.shape
    return (int(columns), int(rows)) if is_transposed(module) else (int(rows), int(columns))


def owners(values: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
    """The head that each column of a projection's output belongs to.

    Args:
        values: [H, N, D] q or k of the attention call, a function of `output`.
        output: [N, F], a leaf.

    Returns:
        int64 [F], -1 for columns that no head reads; None when nothing is read, or when some column reaches several
        heads or another position.
    """
    heads, positions = values.shape[:2]
    generator = torch.Generator().manual_seed(heads)
    probe = torch.randn(values.shape, generator=generator, dtype=values.dtype)

    def pulled(factors: torch.Tensor) -> torch.Tensor:
        gradient = torch.autograd.grad(values, output, probe * factors, retain_graph=True, allow_unused=True)[0]
        return torch.zeros_like(output) if gradient is None else gradient

    plain = pulled(torch.ones(1, 1, 1))
    read = (plain != 0).any(0)
    if not bool(read.any()):
        return None
    by_position = 2.0 ** torch.arange(positions)
    if not torch.equal(pulled(by_position[None, :, None]), plain * by_position[:, None]):
        return None
    index = torch.arange(heads)
    found = torch.zeros(output.shape[-1], dtype=torch.int64)
    for shift in range(0, max(heads - 1, 1).bit_length(), _DIGIT_BITS):
        digit = (index >> shift) % (1 << _DIGIT_BITS)
        scaled = pulled((2.0**digit)[:, None, None])
        # Where the row that is looked at is 0, another row of the column tells.
        row = (plain != 0).int().argmax(0)
        ratio = scaled.gather(0, row[None])[0] / plain.gather(0, row[None])[0]
        exponent = torch.log2(ratio.abs()).round().nan_to_num().clamp(0, (1 << _DIGIT_BITS) - 1)
        if not torch.equal(scaled[:, read], plain[:, read] * 2.0 ** exponent[read]):
            return None
        found += exponent.to(torch.int64) << shift
    return torch.where(read, found, torch.full_like(found, -1))


def find_projection(
    values: torch.Tensor, outputs: Mapping[str, torch.Tensor], modules: Mapping[str, torch.nn.Module]
) -> Projection | None:
    """The linear layer that projects to the heads of q or k.

    Args:
        values: [H, N, D] q or k of the attention call.
        outputs: [N, F] outputs of linear layers by module name, leaves of the graph.
        modules: these layers by name.

    Returns:
        The one layer of which every head reads equally many columns of its own, at most D; None when there is none,
        or more than one.
    """
    heads, _, size = values.shape
    found: list[Projection] = []
    for name, output in outputs.items():
        owner = owners(values, output)
        if owner is None:
            continue
        of_head = [torch.nonzero(owner == head).flatten() for head in range(heads)]
        counts = {len(columns) for columns in of_head}
        if len(counts) == 1 and 0 < counts.pop() <= size:
            found.append(
                Projection(
                    module=name,
                    columns=torch.stack(of_head),
                    transposed=is_transposed(modules[name]),
                    width=linear_shape(modules[name])[1],
                )
            )
    return found[0] if len(found) == 1 else None


def is_direct(values: torch.Tensor, output: torch.Tensor, columns: torch.Tensor) -> bool:
    """Whether q is the projection's output itself: only moved, and each element where `columns` says.

    Args:
        values: [H, N, D] q of the attention call, a function of `output`.
        output: [N, F], a leaf that holds no value twice in a row.
        columns: int64 [H, D].
    """
    node, seen = values.grad_fn, 0
    while node is not None:
        inputs = [before for before, _ in node.next_functions if before is not None]
        if node.name().rsplit("::", 1)[-1] not in _MOVES or len(inputs) > 1 or seen > 64:
            return False
        node, seen = (inputs[0] if inputs else None), seen + 1
    return torch.equal(values, output[:, columns].transpose(0, 1))
