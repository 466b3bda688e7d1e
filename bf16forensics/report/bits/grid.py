"""Rows of binary digits under one another, shortened and wrapped so that every column stays aligned. Plain ASCII."""

from collections.abc import Iterator, Sequence

#: Columns in which no row changes are shortened from this many on; "[0 x 123]" is shorter than them.
_RUN = 16
#: Room for the label and the sign of a row.
_HEAD = 8
#: Mark of a row that continues below.
_MORE = " .."


def grid_lines(rows: Sequence[tuple[str, str, str]], num_before_point: int, width: int) -> list[str]:
    """Labelled rows of digits with a binary point.

    Where all rows keep their digit over a long run of columns, each shows "[digit x columns]" instead. What is still
    too long continues in further groups of lines.

    Args:
        rows: Label, sign and digits of each; digits all of one length, leading blanks allowed.
        num_before_point: Columns before the binary point.
        width: Columns of the terminal.
    """
    texts = ["" for _ in rows]
    lines: list[str] = []
    for pieces in _pieces([digits for _, _, digits in rows], num_before_point):
        if len(texts[0]) + len(pieces[0]) > width - _HEAD - len(_MORE):
            lines += [*_group(rows, [f"{text}{_MORE}" for text in texts]), ""]
            texts = ["" for _ in rows]
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return [*lines, *_group(rows, texts)]


def _group(rows: Sequence[tuple[str, str, str]], texts: Sequence[str]) -> list[str]:
    return [f"  {label:<4}{sign:<2}{text}".rstrip() for (label, sign, _), text in zip(rows, texts, strict=True)]


def _pieces(digits: Sequence[str], num_before_point: int) -> Iterator[list[str]]:
    """Parts of the rows, equally wide in all of them: single columns, the point, shortened runs."""
    width = len(digits[0])
    start = 0
    while start < width:
        if start == num_before_point:
            yield ["."] * len(digits)
        # A run ends at the point, so that the point keeps its place.
        limit = num_before_point if start < num_before_point else width
        end = start + 1
        while end < limit and all(row[end] == row[start] for row in digits):
            end += 1
        if end - start >= _RUN and all(row[start] != " " for row in digits):
            yield [f"[{row[start]} x {end - start}]" for row in digits]
            start = end
        else:
            yield [row[start] for row in digits]
            start += 1
