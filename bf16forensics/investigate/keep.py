"""Records of the heads worth keeping: what a case stores so that later commands need not capture again.

Shapes: S sequences, N queries, M keys, D and E head sizes of q/k and v, C width of the input of the QKV projection.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRecord:
    """One head's attention call over the sequences of a run. q, k, v and dO hold values of `storage`."""

    #: "L1.H7"; also the name of its file.
    name: str
    #: 0-based.
    layer: int
    head: int
    #: Positions of the sequences among all sequences analysed, 0-based, in the order of the first axis.
    sequences: tuple[int, ...]
    #: Training step of each sequence, None when unknown; one entry a sequence.
    steps: tuple[int | None, ...]
    #: Format of q, k, v and dO: "bf16", "fp16" or "fp32".
    storage: str
    #: Name of the recipe of the run.
    recipe: str
    #: [S, N, D] queries.
    q: torch.Tensor
    #: [S, M, D] keys of the head's key/value head.
    k: torch.Tensor
    #: [S, M, E] values of the head's key/value head.
    v: torch.Tensor
    #: [S, N, E] gradient of each sequence's mean loss with respect to O; None when there is no loss.
    do: torch.Tensor | None = None
    #: [S, N, C] input of the QKV projection, FP32; None when unknown.
    x: torch.Tensor | None = None
    #: [D, C] projections of the head, FP32; None when unknown.
    w_q: torch.Tensor | None = None
    w_k: torch.Tensor | None = None
    #: Softmax scale.
    scale: float
    #: Bottom-right causal mask.
    causal: bool
    #: Visible keys of a sliding window; None for none.
    window: int | None
    #: Soft-cap of the scores; None for none.
    softcap: float | None = None
    #: [S, N, M] bool (True: visible) or floating (added to the scores); None for none.
    mask: torch.Tensor | None = None
    #: [S, M] bool, True where the key is real; None when nothing is padded.
    key_padding: torch.Tensor | None = None
    #: [S, M] int document of each position; None for one document.
    document_ids: torch.Tensor | None = None
