"""Numbers and sentences of trace-head, shared by its terminal report, its JSON document and its figure."""

import math
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np

from bf16forensics.evidence.trace.results import CumulativeTrace, HeadTrace, RowTies, SignTable, TokenError
from bf16forensics.recipe.model import Recipe
from bf16forensics.verdict.words import count, number, percent

#: Digits of float64 after the first one.
_DECIMALS = 16
#: The exact decimal value of any float64 has fewer digits than this.
_EXACT = Context(prec=1200)
_NO_JUMP = "none: the error is 0 at every key"


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign, "+" too; 0 and what is not finite as `number` has them."""
    return f"+{number(value, digits)}" if value > 0 and math.isfinite(value) else number(value, digits)


def fit(value: float, width: int, digits: int = 6) -> str:
    """A signed number with as many of `digits` significant digits as `width` columns hold, at least one."""
    texts = (signed(value, wanted) for wanted in range(digits, 0, -1))
    return next((text for text in texts if len(text) <= width), signed(value, 1))


def aligned_sum(first: float, rest: float, total: float) -> tuple[str, str, str]:
    """Three numbers, first + rest = total, as decimals with one exponent that add up to the last printed digit.

    The first and the total are rounded to 17 digits of the larger of the two; what is printed for the rest is their
    difference, which differs from `rest` by less than float64 can hold beside them. Not finite: as they are.

    Args:
        first: the summand that was computed.
        rest: total - first, as computed.
        total: the sum.
    """
    if not all(map(math.isfinite, (first, rest, total))):
        return number(first), number(rest), number(total)
    largest = max(abs(first), abs(total))
    exponent = 0 if largest == 0 else math.floor(math.log10(largest))
    step = Decimal(1).scaleb(-_DECIMALS)

    def mantissa(value: float) -> Decimal:
        return (_EXACT.scaleb(Decimal(value), -exponent)).quantize(step, ROUND_HALF_EVEN, context=_EXACT)

    one, whole = mantissa(first), mantissa(total)
    tail = f"e{exponent}" if exponent else ""
    return tuple(f"{value:+.{_DECIMALS}f}{tail}" for value in (one, whole - one, whole))  # type: ignore[return-value]


def place(token: TokenError) -> str:
    """A row in words: "token 50 of sequence 3 (step 401)"."""
    step = "" if token.step is None else f" (step {token.step:,})"
    return f"token {token.token} of sequence {token.sequence}{step}"


def remainder_words(recipe: Recipe, delta: str) -> str:
    """What the error of delta holds beside the contributions of the features."""
    if recipe.delta_source != "o":
        return f"all else ({delta} does not come from O)"
    return f"rounding of {delta}" if recipe.delta_products == "fp32" else f"rounding of dO * O and {delta}"


def exists_words(cumulative: CumulativeTrace) -> str:
    """How many of the running values a computation ever holds."""
    total, existing = len(cumulative.keys), int(np.count_nonzero(cumulative.exists))
    if existing == total:
        return f"all {count(total, 'running value')} exist in the computation modelled"
    share = f"{existing:,} of {count(total, 'running value')}"
    return f"{share} exist in the computation modelled, the others would if the row ended there"


def bound_share(cumulative: CumulativeTrace) -> float | None:
    """Largest |error| over half an ulp at the same key; None without a bound, nan where it is nowhere defined."""
    if cumulative.half_ulp is None:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.abs(cumulative.error) / cumulative.half_ulp
    defined = shares[np.isfinite(shares)]
    return float(defined.max()) if len(defined) else math.nan


def bound_words(cumulative: CumulativeTrace) -> str:
    """Whether the errors keep to the bound of a single rounding."""
    share = bound_share(cumulative)
    if share is None or cumulative.bound_exceeded is None:
        return "no half-ulp bound: errors of this accumulator add up"
    if cumulative.bound_exceeded:
        return (
            f"the half-ulp bound is EXCEEDED at {count(cumulative.bound_exceeded, 'key')} (largest error "
            f"{number(share, 4)} of it): the trace is wrong, please report it"
        )
    return f"every error is within half an ulp (largest {number(share, 4)} of it)"


def jumps_words(trace: HeadTrace, p_bar: str) -> str:
    """How many of the largest jumps sit at P-bar = 1, against how many keys do: in the feature, then in the row."""
    return "; ".join(filter(None, (_jumps_of_feature(trace.cumulative, p_bar), _jumps_of_row(trace, p_bar))))


def _jumps_of_row(trace: HeadTrace, p_bar: str) -> str:
    row = trace.row_jumps
    if row is None or not row.top or trace.num_features < 2:
        return ""
    return (
        f"over all {count(trace.num_features, 'feature')} of the row {row.top_at_ones} of the {row.top} largest sit "
        f"there, and {percent(row.share_at_ones)} of all steps by size, with {percent(row.share_of_keys)} of the keys"
    )


def _jumps_of_feature(cumulative: CumulativeTrace, p_bar: str) -> str:
    if not cumulative.top_jumps:
        return _NO_JUMP
    ones, keys = int(np.count_nonzero(cumulative.is_one)), len(cumulative.keys)
    return f"{largest_words(cumulative, p_bar)}, which {ones:,} of {count(keys, 'key')} have"


def largest_words(cumulative: CumulativeTrace, p_bar: str) -> str:
    """How many of the largest jumps of a feature sit at P-bar = 1."""
    if not cumulative.top_jumps:
        return _NO_JUMP
    if cumulative.top_jumps == 1:
        return f"the one jump {'sits' if cumulative.top_jumps_at_ones else 'does not sit'} at {p_bar} = 1"
    # Fewer than ten are all there are.
    largest = "ten largest jumps" if cumulative.top_jumps == 10 else f"{cumulative.top_jumps} jumps"
    sit = "sits" if cumulative.top_jumps_at_ones == 1 else "sit"
    return f"{cumulative.top_jumps_at_ones} of the {largest} {sit} at {p_bar} = 1"


def ends_words(cumulative: CumulativeTrace) -> str:
    """What O comes out as."""
    return (
        f"O of this feature: {number(cumulative.o_accumulator, 6)} from the accumulator's end, "
        f"{number(cumulative.o_lp, 6)} by the recipe, {number(cumulative.o_hp, 9)} in high precision"
    )


def ties_words(ties: RowTies, p_bar: str) -> str:
    """The final rounding of the row against the law for ties and residues."""
    point = {"o_bar": "O-bar", "o": "O"}.get(ties.point, ties.point)
    return (
        f"final rounding of {point} over {count(len(ties.error_ulp), 'feature')}, {count(ties.ones, 'key')} at "
        f"{p_bar} = 1: mean error {signed(ties.mean_error_ulp)} ulp, law {signed(ties.mean_law_ulp)} (+ away from 0); "
        f"{percent(ties.tie_share)} halfway, {percent(ties.same_sign_share)} of the residues with the main sum's sign"
    )


def head_words(trace: HeadTrace) -> str:
    """Which head, over what: the paper counts from 1."""
    traced = len(trace.sequences)
    which = "" if traced == trace.sequences_of_run else f"{traced:,} of "
    return (
        f"L{trace.layer}.H{trace.head}, counted from 0 (the paper's layer {trace.layer + 1}, head {trace.head + 1}); "
        f"{which}{count(trace.sequences_of_run, 'sequence')} of {count(trace.num_queries, 'query', 'queries')}, "
        f"{count(trace.num_features, 'feature')}"
    )


def has_delta(trace: HeadTrace) -> bool:
    """Whether the rows have an error of delta: not without dO, nor by a recipe without a backward pass."""
    return not math.isnan(trace.delta_err_sum)


def delta_words(trace: HeadTrace, delta: str) -> str:
    """The error of delta over all rows."""
    if not has_delta(trace):
        why = "there is no dO" if trace.token is None else "the recipe has no backward pass"
        return f"no error of {delta}: {why}; traced are the row and the feature with the largest error of O"
    mean = trace.delta_err_sum / trace.rows if trace.rows else math.nan
    return (
        f"error of {delta}, summed over {count(trace.rows, 'row')}: {signed(trace.delta_err_sum, 4)} (mean "
        f"{signed(mean)}); {trace.positive:,} up, {trace.negative:,} down, "
        f"{trace.rows - trace.positive - trace.negative:,} without a sign that counts"
    )


def sign_cell(signs: SignTable, sign_do: int, sign_err: int) -> str:
    """The features of one pair of signs: "12 features, +1.2e-7"; "none" without any."""
    found = next((cell for cell in signs.cells if (cell.sign_do, cell.sign_err) == (sign_do, sign_err)), None)
    if found is None or not found.features:
        return "none"
    return f"{count(found.features, 'feature')}, {signed(found.contribution)}"


def correlation_words(signs: SignTable) -> str:
    """Whether the two signs go together."""
    correlation = "not defined" if math.isnan(signs.correlation) else signed(signs.correlation)
    zero = f"; {count(signs.zero, 'feature')} with dO or error 0" if signs.zero else ""
    return f"mean of sign(dO) sign(error) {correlation}{zero}"
