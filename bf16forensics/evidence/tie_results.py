"""What the evidence says about the final rounding of rows with several P-bar = 1: scalars only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TieClass:
    """Rows with about as many P-bar = 1: what the rounding that ends their sum did, over all their elements."""

    #: Fewest and most P-bar = 1 (rounded) of a row.
    ones_min: int
    ones_max: int
    rows: int
    #: Different sets of keys with P-bar = 1, each sequence by itself. Rows that share one share the main sum, and the
    #: standard errors count them as one observation.
    groups: int
    #: (row, feature) pairs whose sum is finite and not 0.
    elements: int
    #: Share of elements whose main sum alone lies halfway between two values of the format.
    tie_share: float
    #: Shares of elements with 0, 1, 2, and 3 or more bits of the main sum below the last bit that is kept.
    bits_dropped: tuple[float, float, float, float]
    #: Share of the residues that are not 0 that have the sign of the main sum.
    same_sign_share: float
    #: Mean residue (+ along the main sum) and mean of its size, in ulp; each residue limited to one ulp.
    residue_ulp_mean: float
    residue_ulp_size: float
    #: Mean error of the rounding in ulp, + away from zero; and the mean of what the law expects, element by element.
    error_ulp_mean: float
    law_ulp_mean: float
    #: Standard error of `error_ulp_mean`, and of error - law; nan where fewer than 10 groups carry the elements.
    standard_error: float
    difference_standard_error: float
    #: error / its standard error; (error - law) / its own.
    z_zero: float
    z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TieStatistics:
    """The rounding that ends the sum of rows with several P-bar = 1, against the law of ties and residues."""

    #: "o_bar" or "o": which rounding; and its format.
    point: str
    format: str
    #: By number of ones, for the classes that have rows.
    classes: tuple[TieClass, ...]
    #: Rows with so many ones (over 64) that no bias is left; in no class.
    rows_beyond: int
