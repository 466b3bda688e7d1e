"""The line about ties: what the rounding that ends the sum did in rows with several P-bar = 1."""

import math

from bf16forensics.evidence.tie_results import TieClass
from bf16forensics.investigate.result import LocalizeResult
from bf16forensics.report.glyphs import Glyphs
from bf16forensics.report.layout import Line, labelled
from bf16forensics.verdict.findings import Judgement
from bf16forensics.verdict.words import head_name, number, percent

#: Heads that are told of, fewest rows worth a line, and lines.
_HEADS = 2
_LEAST_ROWS = 20
_LINES = 4
_POINTS = {"o_bar": "O-bar", "o": "O"}


def ties(result: LocalizeResult, judgement: Judgement, width: int, glyphs: Glyphs) -> list[Line]:
    """The first two ranked heads with 20 rows of one class or more, each for the class that has most rows.

    Args:
        result: what was measured.
        judgement: the ranking.
        width: columns.
        glyphs: signs to use.

    Returns:
        At most four lines; none where no head has such rows.
    """
    found = {(head.layer, head.head): head.ties for head in result.heads}
    texts: list[str] = []
    for key in judgement.ranking:
        statistics = found[key]
        if statistics is None or not statistics.classes or len(texts) == _HEADS:
            continue
        most = max(statistics.classes, key=lambda candidate: candidate.rows)
        if most.rows >= _LEAST_ROWS:
            texts.append(f"{head_name(*key)}: {_words(most, _POINTS[statistics.point], glyphs.p_bar)}")
    return labelled("ties", "; ".join(texts), width, most=_LINES) if texts else []


def _words(found: TieClass, point: str, p_bar: str) -> str:
    ones = str(found.ones_min) if found.ones_min == found.ones_max else f"{found.ones_min} to {found.ones_max}"
    none = math.isnan(found.same_sign_share)
    signs = "no residue" if none else f"{percent(found.same_sign_share)} same sign"
    error, law = _signed(found.error_ulp_mean), _signed(found.law_ulp_mean)
    return (
        f"{found.rows:,} rows with {ones} {p_bar} = 1, error of {point} {error} ulp "
        f"(s.e. {number(found.standard_error, 2)}, law {law}), {percent(found.tie_share)} ties, {signs}"
    )


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 and math.isfinite(value) else number(value)
