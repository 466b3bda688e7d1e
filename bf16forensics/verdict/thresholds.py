"""The limits that separate the verdicts, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits used by `judge`. Every one of them is printed in the JSON document."""

    #: Sequences. With n sequences a sign-flip test cannot go below p = 2^-(n - 1); family-wise over tens of heads, and
    #: for a jackknife whose standard error is itself known to a fifth, 16 is the least that carries a decision.
    min_sequences: int = 16
    #: Effective sequences. Below it a few sequences carry the whole error power, and bounds on a mean mean nothing.
    min_n_effective: float = 10.0
    #: Family-wise level of every test.
    alpha: float = 0.05
    #: Optimiser steps K over which a constant bias must stay hidden. Sampling noise of K steps adds up as sqrt(K), a
    #: bias as K, so the bias is harmless while B < sqrt(V_g / M) / sqrt(K), M sequences a step.
    harmless_steps: int = 1000
    #: rho above which rounding perturbs the gradient more than the choice of the sequences does (the head then trains
    #: as if on less than half of the batch, 1 / (1 + rho^2)).
    rho_limit: float = 1.0
    #: p of the sign-flip test of the mean gradient below which it counts as detected; a ratio to an undetected mean
    #: gradient is a ratio to noise.
    signal_alpha: float = 0.05
    #: Share of the squared delta defect carried by swamped rows from which they deserve a note.
    swamped_share: float = 0.1
    #: Rows within 1e-3 of the maximum over rows within 2^-9 (the distance at which P-bar still rounds to 1): the
    #: ratio of the two distances is what scores of flat density give.
    chance_ratio: float = 1e-3 / 2**-9
    #: Findings of one run; heads beyond are counted in one finding a code.
    max_findings: int = 20
