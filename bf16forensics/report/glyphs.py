"""Signs with a plain twin, for consoles that cannot show them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The signs of the terminal report."""

    #: P-bar = exp(S - rowmax).
    p_bar: str
    #: delta = rowsum(dO * O).
    delta: str
    #: Largest singular value.
    sigma: str


UNICODE = Glyphs(p_bar="P\u0304", delta="\u03b4", sigma="\u03c3")
ASCII = Glyphs(p_bar="P-bar", delta="delta", sigma="sigma")


def glyphs_for(encoding: str | None) -> Glyphs:
    """The signs that a stream can carry: all of the Unicode ones, or none of them.

    Args:
        encoding: of the stream; None or an unknown name counts as ASCII.
    """
    try:
        f"{UNICODE.p_bar}{UNICODE.delta}{UNICODE.sigma}".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE
