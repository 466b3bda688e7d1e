"""From the output of the query projection to q: QK-norm, rotation, reordering, as a linear map around what was seen.

The gradient of W_Q needs dQ carried back to the output of the projection, and a change of W_Q moves q through the same
map forwards. Both are products with the Jacobian of the model's own operations, taken from their graph, so nothing has
to be known about them.

Shapes: K gradients or moves, H query heads, N queries, D head size, F outputs of the projection.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueryPath:
    """The graph from the projection's output to q, for one call. Positions do not mix in it; heads may.

    A norm over all heads together mixes them: the gradient of one head's W_Q then holds a part that comes from the
    other heads' dQ, as it does in training.
    """

    #: [N, F] output of the projection, the leaf of the graph; FP32 in captures.
    raw: torch.Tensor
    #: [H, N, D] q before it is rounded, a function of `raw`.
    query: torch.Tensor
    #: int64 [H, D] column of `raw` that each row of a head's W_Q produces.
    columns: torch.Tensor

    def pull_back(self, gradients: torch.Tensor) -> torch.Tensor:
        """Gradients by q as gradients by the rows of W_Q x.

        Args:
            gradients: [K, H, N, D], any floating dtype, on any device.

        Returns:
            [K, H, N, D] in the dtype of the graph, on the device of the gradients; NaN where the path itself is NaN.
        """
        given = gradients.to(self.query.device, self.query.dtype)
        return torch.stack([self._by_head(self._pull_back(one)) for one in given]).to(gradients.device)

    def push_forward(self, moves: torch.Tensor) -> torch.Tensor:
        """Moves of the rows of W_Q x as moves of q.

        Args:
            moves: [K, H, N, D], any floating dtype, on any device; all heads of a move happen at once.

        Returns:
            [K, H, N, D] in the dtype of the graph, on the device of the moves.
        """
        with torch.enable_grad():
            # The product with the Jacobian transposed is linear in its operand: differentiating it gives the Jacobian.
            operand = torch.zeros_like(self.query).requires_grad_()
            product = torch.autograd.grad(self.query, self.raw, operand, create_graph=True)[0]
        pushed = []
        for one in moves.to(self.raw.device, self.raw.dtype):
            move = torch.zeros_like(self.raw)
            move[:, self.columns] = one.transpose(0, 1)
            pushed.append(torch.autograd.grad(product, operand, move, retain_graph=True)[0])
        return torch.stack(pushed).to(moves.device)

    def _pull_back(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(self.query, self.raw, gradient, retain_graph=True)[0]

    def _by_head(self, values: torch.Tensor) -> torch.Tensor:
        """[N, F] as [H, N, D]."""
        return values[:, self.columns].transpose(0, 1)
