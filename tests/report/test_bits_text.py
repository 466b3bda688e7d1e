"""The explanation of a sum for a terminal and as JSON: whole texts, widths, and nothing lost on the way."""

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bf16forensics.floats.bits import explain_bits
from bf16forensics.floats.formats import BF16, FORMATS, FP16, FP32, FP64, format_named
from bf16forensics.floats.literal import read_operand
from bf16forensics.report.bits.document import bits_object
from bf16forensics.report.bits.grid import grid_lines
from bf16forensics.report.bits.numbers import exact_text, hex_text, item, ulp_text
from bf16forensics.report.bits.text import bits_text
from bf16forensics.report.jsonio import dumps

PUBLISHED = ("11000000000110100000111000101110", "11000000000100110000000000000000")

PUBLISHED_TEXT = """\
sum of 2 terms in fp32, rounded to bf16 (rne: to nearest, ties to even)

a   -2.4071154594421387  fp32  0xC01A0E2E
    1 10000000 00110100000111000101110
    read as 32 binary digits: the bits of a value of fp32
b   -2.296875  fp32  0xC0130000
    1 10000000 00100110000000000000000
    read as 32 binary digits: the bits of a value of fp32

exact sum
  a   -  1.0011010000011100010111
  b   -  1.0010011000000000000000
  sum - 10.0101101000011100010111
  columns       the digit before the point counts 2^1, the last one 2^-21
  exact sum     -4.703990459442139
                carry out: the sum is 1 bit wider than the largest term and
                moves right by 1

rounding to fp32: nothing is dropped: the format holds the value
  result        -4.703990459442139  0xC0968717  fp32
                11000000100101101000011100010111
                = 1 10000001 00101101000011100010111

rounding to bf16 (rne: to nearest, ties to even)
  value         -4.703990459442139
  kept|dropped  - 1.0010110|1 0 00011100010111  x 2^2
  bits          last kept bit 0, guard 1, round 0, sticky 1
  residue       0.0276947 ulp below the guard bit
  tie           no
  1 ulp         2^-5 = 0.03125
  toward zero   -4.6875  0xC096
  away          -4.71875  0xC097
  decision      up: guard 1 and a bit below it is 1: the dropped bits are more
                than half an ulp
  result        -4.71875  0xC097  bf16
                1100000010010111  = 1 10000001 0010111
  error         -0.014759540557861328  (-0.472305 ulp)  result - value
without the residue
  value         -4.703125  (a tie; everything below the guard bit cleared)
  result        -4.6875  0xC096  another result
  error         +0.015625  (+0.5 ulp)
"""

TABLE = """\
               term      running sum          stored L|GRS                 error
  a        -2.40625         -2.40625        -2.40625 0|000                     0
  b       -2.296875        -4.703125         -4.6875 0|100 tie down    +0.015625
  c         -2.3125               -7              -7 0|000             +0.015625
  d              -1               -8              -8 0|000             +0.015625
  running sum: exact sum of what was stored before and the term
  stored: rounded to bf16; error: stored - exact sum of the terms so far
  L last kept bit, G guard, R round, S sticky
"""


def explained(*texts, source=FP32, target=BF16, **options):
    return explain_bits([read_operand(text, source) for text in texts], source=source, target=target, **options)


def text_of(*texts, width=80, all_steps=False, **options):
    return bits_text(explained(*texts, **options), width, all_steps=all_steps)


def test_the_published_event():
    assert text_of(*PUBLISHED) == PUBLISHED_TEXT


def test_the_table_of_a_sum_stored_after_every_addition():
    text = text_of("-2.40625", "-2.296875", "-2.3125", "-1.0", accumulator="each-add")
    assert TABLE in text
    assert text.endswith("\nall together    exact sum -8.015625,  result - exact sum +0.015625\n")


@pytest.mark.parametrize(
    ("texts", "options", "lines"),
    [
        (("0xC01A", "0xC013"), {}, ["  tie           yes", "last kept bit 0, guard 1, round 0, sticky 0", "0xC096"]),
        (("0xC0968002",), {}, ["conversion of fp32 to bf16", "sticky 1", "-4.71875  0xC097"]),
        (("1", "-1"), {}, ["  sum + 0\n", "the terms cancel exactly: +0", "0  0x0000  bf16"]),
        (("-0", "-0"), {}, ["a sum of zeros: -0", "-0  0x8000  bf16"]),
        (("inf", "-inf"), {}, ["infinities of both signs: the sum is NaN", "nan  0x7FC0"]),
        (("-inf", "3"), {}, ["an infinity swallows every finite term", "-inf  0xFF80"]),
        (("1", "-0.9375"), {}, ["cancellation: the sum is 4 bits narrower"]),
        (("0x7F7F8000",), {}, ["inf  0x7F80", "becomes", "error         none: the result is not finite"]),
        (("500",), {"target": format_named("e4m3")}, ["none in the format", "held there by saturation"]),
        (("0x00008001",), {}, ["below the normal range of bf16", "- value"]),
        (("0.1",), {}, ["rounding to fp32 changed it by ~+1.4901161193847657e-09"]),
        (
            ("1", "0x1.000002p-8"),
            {},
            ["double rounding: the step through fp32 changed the result", "1.0078125  0x3F81"],
        ),
        (("1.00390625000001",), {}, ["double rounding: writing the number in fp32 first changed the result"]),
        (
            ("0.1",),
            {"mode": "stochastic"},
            ["decision      open: ", "0.10009765625  0x3DCD  with probability 52429/65536"],
        ),
        (("0.1", "0.2"), {"mode": "stochastic", "seed": 5}, ["random          seed 5, 32 bits a rounding"]),
        (("1", "2", "3"), {"accumulator": "exact"}, ["  c   + ", "moves right by 1"]),
        (("1", "0x1p-25"), {"accumulator": "sm80"}, ["common exponent     2^0; the last column kept is 2^-24"]),
        (("10000000",), {}, ["(not the decimal; that is 10000000.0)"]),
    ],
    ids=str,
)
def test_what_the_text_says(texts, options, lines):
    text = text_of(*texts, **options)
    flat = " ".join(text.split())
    for line in lines:
        assert line in text or " ".join(line.split()) in flat


def test_an_open_sum_of_three_has_no_error():
    text = text_of("0.1", "0.2", "0.3", mode="stochastic")
    assert text.endswith("all together    exact sum 0.6000000163912773\n")


def test_sums_beyond_every_double_are_shown():
    huge = ["0x1.fffffffffffffp1023"] * 3
    text = text_of(*huge, source=FP64, target=FP64, accumulator="each-add")
    assert "inf" in text
    assert "~inf" in text
    assert "0x1.fffffffffffffp+1024" in text_of(*huge[:2], source=FP64, target=FP64)


def test_every_step_in_full_on_request():
    terms = [str(number) for number in (1, 2, 3, 4)]
    assert text_of(*terms).count("to the running sum") == 1
    assert text_of(*terms, all_steps=True).count("to the running sum") == 3
    many = ["1"] * 40
    assert "24 more terms are not shown" in text_of(*many, accumulator="exact")
    assert "not shown" not in text_of(*many, accumulator="exact", all_steps=True)
    blocks = text_of(*many, accumulator="sm80")
    assert blocks.count("common exponent") == 5
    assert blocks.count("addend") == 1
    assert text_of(*many, accumulator="sm80", all_steps=True).count("addend") == 5


def any_pattern(fmt):
    return st.integers(0, (1 << fmt.bits) - 1).map(lambda code: f"{fmt.name}:{code:0{fmt.bits // 4}x}")


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(FORMATS).flatmap(any_pattern), min_size=1, max_size=6),
    st.sampled_from(FORMATS),
    st.sampled_from(["fp32-prefix", "each-add", "exact"]),
    st.sampled_from(["rne", "rz", "rna", "stochastic"]),
    st.integers(60, 100),
    st.booleans(),
)
def test_no_line_is_wider_than_asked_for_and_all_is_ascii(texts, target, accumulator, mode, width, all_steps):
    options = {"seed": 1} if mode == "stochastic" else {}
    bits = explained(*texts, target=target, accumulator=accumulator, mode=mode, **options)
    text = bits_text(bits, width, all_steps=all_steps)
    assert text.isascii()
    # The table of steps has one width, the narrowest terminal's.
    widest = max(width, 80) if len(texts) > 2 else width
    assert max(map(len, text.splitlines())) <= widest
    assert not any(line != line.rstrip() for line in text.splitlines())
    json.loads(dumps(bits_object(bits)), parse_constant=pytest.fail)


@settings(max_examples=20)
@given(st.lists(any_pattern(BF16), min_size=1, max_size=20), st.sampled_from(["sm80", "sm90"]))
def test_blocks_fit_80_columns(texts, accumulator):
    operands = [read_operand(text) for text in texts]
    finite = [operand for operand in operands if operand.pattern.is_finite and abs(operand.pattern.number) < 1e37]
    if finite:
        text = bits_text(explain_bits(finite, accumulator=accumulator, source=FP32, target=FP16), 80, all_steps=True)
        assert max(map(len, text.splitlines())) <= 80


@given(st.integers(-(10**30), 10**30), st.integers(-300, 300))
def test_hexadecimal_floats_are_exact(mantissa, exponent):
    number = mantissa * Fraction(2) ** exponent
    sign, rest = (-1, hex_text(number)[1:]) if mantissa < 0 else (1, hex_text(number))
    digits, power = rest.removeprefix("0x").split("p")
    whole, _, fraction = digits.partition(".")
    value = Fraction(int(whole + fraction, 16), 16 ** len(fraction)) * Fraction(2) ** int(power)
    assert sign * value == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_what_a_double_holds_is_written_as_python_writes_it(value):
    assert float(exact_text(Fraction(value))) == value
    assert "~" not in exact_text(Fraction(value))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Fraction(-7), "-7"),
        (Fraction(1, 3), "~0.3333333333333333"),
        (Fraction(2) ** 2000, "0x1p+2000"),
        (Fraction(-3, 2**1200), "-0x1.8p-1199"),
        (1 + Fraction(1, 2**100), "~1"),
    ],
)
def test_what_no_double_holds_is_marked(number, text):
    assert exact_text(number) == text


def test_an_ulp_that_only_looks_like_a_half_is_marked():
    assert ulp_text(Fraction(1, 2)) == "0.5"
    assert ulp_text(Fraction(1, 2) - Fraction(1, 2**40)) == "~0.5"
    assert ulp_text(Fraction(-1, 2), is_signed=True) == "-0.5"


def test_long_runs_are_shortened_alike_in_every_row():
    rows = [("a", "+", "1" + "0" * 40 + "1"), ("b", "-", "0" * 41 + "1"), ("sum", "+", "0" + "1" * 40 + "0")]
    assert grid_lines(rows, 1, 80) == [
        "  a   + 1.[0 x 40]1",
        "  b   - 0.[0 x 40]1",
        "  sum + 0.[1 x 40]0",
    ]


def test_long_rows_continue_with_their_columns_aligned():
    digits = "10" * 60
    lines = grid_lines([("a", "+", digits), ("b", "-", digits[::-1])], 2, 60)
    assert len(lines) == 8
    groups = [lines[0:2], lines[3:5], lines[6:8]]
    for first, second in groups:
        assert len(first) == len(second) <= 60
    joined = ["".join(group[i][8:].removesuffix(" ..") for group in groups) for i in (0, 1)]
    assert joined == [f"10.{digits[2:]}", f"01.{digits[::-1][2:]}"]


def test_cells_longer_than_a_line_are_cut_between_words_or_within():
    assert item("label", ["a" * 30, "bb cc"], 40) == ["  label         " + "a" * 24, " " * 16 + "a" * 6 + "  bb cc"]


def test_the_json_object_holds_the_published_event():
    found = json.loads(dumps(bits_object(explained(*PUBLISHED))))
    assert (found["kind"], found["accumulator"]) == ("sum", "fp32-prefix")
    assert found["result"]["binary"] == "1100000010010111"
    assert found["error"] == {"value": -0.014759540557861328, "hex": "-0x1.e3a4p-7"}
    assert float.fromhex(found["error"]["hex"]) == found["error"]["value"]
    rounding = found["rounding"]
    assert (rounding["last_kept_bit"], rounding["guard"], rounding["round"], rounding["sticky"]) == (0, 1, 0, 1)
    assert rounding["without"][0]["result"]["value"] == -4.6875
    assert rounding["without"][0]["error"]["value"] == 0.015625
    assert found["steps"][-1]["sum"]["carry"] is True


def test_json_of_what_is_not_finite_is_strict():
    found = json.loads(dumps(bits_object(explained("inf", "1"))), parse_constant=pytest.fail)
    assert (found["result"]["value"], found["exact_sum"], found["error"]) == ("inf", None, None)
    huge = [read_operand("0x1.fffffffffffffp1023", FP64)] * 2
    total = bits_object(explain_bits(huge, source=FP64, target=FP64))
    assert total["exact_sum"] == {"value": "inf", "hex": "0x1.fffffffffffffp+1024"}
    assert math.isinf(float(total["result"]["value"]))
