"""Documentation of the findings on bias and its coupling to the weights, BF2xx and BF3xx."""

from bf16forensics.verdict.catalogue import Entry

_PAPER = "arXiv 2510.04212, sections 3.2 and 3.3 (from delta to the gradient of W_Q, isolation by higher precision)"
_U_STATISTICS = (
    "U-statistics over sequences: products of different sequences only, so that a sequence's own noise never counts "
    "as a mean"
)
_HARMLESS = (
    "The harmless limit is sqrt(V_g / M) / sqrt(K): V_g is the variance of the gradient over sequences, M the "
    "sequences of an optimiser step, K = 1,000 steps. Below it a constant bias of K steps is still smaller than the "
    "sampling noise of the same steps."
)

ENTRIES = (
    Entry(
        code="BF201",
        name="delta-bias",
        severity="warning",
        title="delta has a bias",
        what="delta = rowsum(dO * O), as the recipe computes it, differs from the delta that fits the recipe's own "
        "P, and the difference has a sign: summed within each sequence it does not average to zero over sequences.",
        why="delta is subtracted from every dP of its row. A constant error there pushes the whole row of dS the "
        "same way, and is the first half of a compounding error; the second half is that dW_Q feels it (BF301).",
        how="d = delta_lp - rowsum(P_lp * dP) / rowsum(P_lp) for each row, summed by sequence; sign-flip test of the "
        "sums, two-sided, family-wise over heads by the maximum under common flips, p below 0.05, at least 16 "
        "sequences. If the upper bound of the dW_Q bias lies below the harmless limit, the head's verdict is 'bias "
        "without coupling' and the finding is only a note: whatever delta does there, the weights do not feel it.",
        limits="A mean over sequences says nothing about a bias that changes sign from token to token. With one "
        "heavy row the t is not to be trusted: read n_effective, the share of the largest row and the sign without "
        "the top 1 % beside it.",
        would_refute="The mean changes sign without the 1 % of largest rows, or p rises above 0.05 with more "
        "sequences.",
        next_step="If the coupling is undecided, add sequences. If it is below the limit, watch the head at later "
        "checkpoints: the coupling depends on the keys, which move.",
        references=(_PAPER,),
    ),
    Entry(
        code="BF301",
        name="compounding-bias",
        severity="error",
        title="The delta error reaches dW_Q with a constant sign",
        what="The part of the dW_Q error that comes from delta has a mean over sequences, B, that is larger than "
        "the sampling noise can hide over many steps.",
        why="Noise of k steps grows as the root of k, a bias as k. Above the limit the optimiser follows the error "
        "and not the loss; the head's weights grow along it and the error grows with them.",
        how="e_i = -alpha * sum over rows of d * (P_lp K)^T X for every sequence i. B^2 is the U-statistic of e "
        f"with itself. {_HARMLESS} The finding needs the lower 95 % bound of B above the limit and a family-wise "
        "sign-flip p below 0.05, with at least 16 sequences of which at least 10 count (n_effective).",
        limits="The gradient is judged at one checkpoint: that the bias lasts for K steps is an assumption. The "
        "error is local: what travels on through dX to earlier layers is not in it. An optimiser that normalises "
        "by the gradient's size feels a bias differently in heads with small gradients.",
        would_refute="The recipe with the responsible rounding in FP32 shows the same bias, or a rounding that "
        "changes nothing removes it, or more sequences bring the lower bound below the limit.",
        next_step="Run the same batch with that one rounding point in FP32 (RECIPE+o=fp32, RECIPE+o_bar=fp32). If "
        "B falls below the limit, this rounding is the cause, and keeping it in higher precision for this head the "
        "cure.",
        references=(_PAPER, _U_STATISTICS),
    ),
    Entry(
        code="BF302",
        name="noise-above-sampling",
        severity="warning",
        title="Rounding noise exceeds sampling noise",
        what="The error of dW_Q varies from sequence to sequence by more than the gradient itself does.",
        why="With rho = sqrt(V_e / V_g) the head learns as if from a batch 1 + rho^2 times smaller. Above 1 more "
        "than half of the batch is lost to rounding, without any bias.",
        how="V_e and V_g are the variances over sequences of the error and of the gradient, from U-statistics; rho "
        "does not depend on the batch size. Above 1 for the delta part or for the whole error.",
        limits="Noise of this size slows a head down; that it makes training diverge is not known. The variance is "
        "not robust: one odd sequence can carry it, so read n_effective.",
        would_refute="rho falls below 1 with more sequences, or without the sequence that carries the most.",
        next_step="Find out which rounding makes the noise: run with one point in FP32 at a time. The telescope in "
        "the document tells which part of the backward to begin with.",
        references=(_U_STATISTICS,),
    ),
    Entry(
        code="BF303",
        name="compounding-bias-elsewhere",
        severity="error",
        title="dW_Q is biased, but not by delta",
        what="The whole difference between the low- and the high-precision gradient of W_Q is biased beyond the "
        "harmless limit, while its delta part is not.",
        why="A biased gradient compounds whatever made it. But the cures for delta (a consistent delta, a "
        "high-precision output) would not touch this one.",
        how="As BF301, for the whole error. The finding names the largest signed share among scores, cast of dS "
        f"and cast of dQ; with the delta defect and a rest the shares add up to 1. {_HARMLESS}",
        limits="Shares are signed and can exceed 1 where parts cancel. Under recipes that store scores in BF16 the "
        "naive difference of the two deltas mixes in the error of the scores; the defect does not.",
        would_refute="The recipe with the named point in FP32 shows the same bias.",
        next_step="Run the same batch with the named point in FP32 (RECIPE+scores=fp32, +ds=fp32 or +dq=fp32).",
        references=(_PAPER, _U_STATISTICS),
    ),
)
