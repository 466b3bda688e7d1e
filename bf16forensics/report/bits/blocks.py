"""The blocks of a matrix unit as text: common exponent, what alignment cuts off each term, truncation. Plain ASCII."""

from collections.abc import Sequence

from bf16forensics.floats.bits import Bits
from bf16forensics.floats.blocks import Block
from bf16forensics.report.bits.numbers import exact_text, item, label_of, value_text

#: Column of the numbers.
_START = 22


def blocks_lines(bits: Bits, width: int, *, all_steps: bool) -> list[str]:
    """Every block with its sums; the addends of the last block, or of all."""
    blocks = bits.blocks
    lines: list[str] = []
    for block in blocks:
        products = f"the accumulator and {len(block.addends) - 1} products"
        lines += ["", f"block {block.index + 1} of {len(blocks)}: {products}"]
        columns = f"2^{block.common_exponent}; the last column kept is 2^{block.grid_exponent}"
        lines += item("common exponent", [columns], width, start=_START)
        if all_steps or block is blocks[-1]:
            lines += [_row("", "addend", "exponent", "moved", "kept", "lost")]
            lines += [_addend_line(block, index, bits.labels) for index in range(len(block.addends))]
        lines += item("exact sum", [exact_text(block.exact)], width, start=_START)
        lines += item("sum of what is kept", [exact_text(block.aligned)], width, start=_START)
        cells = [value_text(block.result), f"fp32 {block.result.hex}"]
        if block.cut:
            cells.append(f"truncation cut off {exact_text(block.cut)}")
        lines += item("accumulator after", cells, width, start=_START)
    return lines


def _addend_line(block: Block, index: int, labels: Sequence[str]) -> str:
    term = block.addends[index]
    label = "acc" if index == 0 else label_of(block.first + index - 1, labels)
    if term.exponent is None:
        return _row(label, "0", "none", "", "", "")
    moved = str(block.common_exponent - term.exponent)
    numbers = (f"{float(term.exact):.9g}", f"{float(term.kept):.12g}", f"{float(term.lost):.12g}")
    return _row(label, numbers[0], f"2^{term.exponent}", moved, numbers[1], numbers[2])


def _row(label: str, addend: str, exponent: str, moved: str, kept: str, lost: str) -> str:
    return f"{label:>8} {addend:>15} {exponent:>8} {moved:>6} {kept:>19} {lost:>19}".rstrip()
