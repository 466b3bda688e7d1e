"""Operands as people write them: what each form means, how it was read, and what is refused in one line."""

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.floats.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64
from bf16forensics.floats.literal import read_operand


def bits_of(value):
    """FP32 code of a float that FP32 holds, from the C library's conversion."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


@pytest.mark.parametrize(
    ("text", "fmt", "code", "value"),
    [
        # Patterns by their number of digits.
        ("0xC01A", BF16, 0xC01A, -2.40625),
        ("0xc01b", BF16, 0xC01B, -2.421875),
        ("0XC0968000", FP32, 0xC0968000, -4.703125),
        ("0xC0968002", FP32, 0xC0968002, -4.70312595367431640625),
        ("0x7E", E4M3, 0x7E, 448.0),
        ("0xC002_0000_0000_0000", FP64, 0xC002000000000000, -2.25),
        ("11000000000110100000111000101110", FP32, 0xC01A0E2E, -2.4071154594421387),
        ("1100_0000_0001_1010", BF16, 0xC01A, -2.40625),
        ("0b1100000000011010", BF16, 0xC01A, -2.40625),
        ("0b01111110", E4M3, 0x7E, 448.0),
        # 10,000,000 would be an absurd thing to mean by this, but not by its neighbours.
        ("10000000", E4M3, 0x80, -0.0),
        # Prefixes.
        ("bf16:C01A", BF16, 0xC01A, -2.40625),
        ("bf16:0xC01A", BF16, 0xC01A, -2.40625),
        ("BF16:1100000000011010", BF16, 0xC01A, -2.40625),
        ("bf16:0b1100000000011010", BF16, 0xC01A, -2.40625),
        ("fp16:C0D0", FP16, 0xC0D0, -2.40625),
        ("e5m2:7B", E5M2, 0x7B, 57344.0),
        ("e4m3:0b01111110", E4M3, 0x7E, 448.0),
        ("fp32:40400000", FP32, 0x40400000, 3.0),
        ("fp64:4008000000000000", FP64, 0x4008000000000000, 3.0),
        # Four digits that happen to start like a binary prefix are hex.
        ("bf16:0b11", BF16, 0x0B11, struct.unpack("<f", struct.pack("<I", 0x0B110000))[0]),
    ],
)
def test_patterns(text, fmt, code, value):
    operand = read_operand(text)
    assert (operand.pattern.fmt, operand.pattern.code) == (fmt, code)
    assert math.copysign(1, operand.pattern.number) == math.copysign(1, value)
    assert operand.pattern.number == value
    assert operand.written == Fraction(value)
    assert not operand.is_rounded
    assert fmt.name in operand.reading
    assert "digits" in operand.reading


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-2.40625", -2.40625),
        ("+3", 3.0),
        ("7", 7.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1E3", 1000.0),
        ("-0", -0.0),
        ("-0.0e7", -0.0),
        ("0", 0.0),
        ("1100", 1100.0),
        ("1000000", 1000000.0),
        ("100000000", 100000000.0),
        ("-10000000", -10000000.0),
        ("10000000.0", 10000000.0),
        ("0x1.8p+1", 3.0),
        ("-0x.8", -0.5),
        ("0x1p-149", 2.0**-149),
        ("0xAp0", 10.0),
        ("  2  ", 2.0),
        ("\N{MINUS SIGN}2.40625", -2.40625),
        ("1e\N{MINUS SIGN}0", 1.0),
    ],
)
def test_values(text, value):
    operand = read_operand(text)
    assert operand.pattern.fmt is FP32
    assert operand.pattern.code == bits_of(value)
    assert operand.written == Fraction(value)
    assert not operand.is_rounded


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("0.1", Fraction(1, 10)),
        ("1e-3", Fraction(1, 1000)),
        ("16777217", Fraction(16777217)),
        ("-1e-50", Fraction(-1, 10**50)),
    ],
)
def test_a_decimal_that_the_format_does_not_hold_is_rounded_and_says_so(text, written):
    operand = read_operand(text)
    # float() rounds the decimal to FP64 once; these four do not lie so close to a tie that FP32 would notice.
    assert operand.pattern.code == bits_of(float(text))
    assert operand.written == written
    assert operand.is_rounded
    assert operand.reading == "a decimal, rounded to fp32"


def test_a_decimal_is_rounded_in_one_step():
    # Just above the middle of two FP32 values, by less than FP64 can tell: by way of FP64 it would be a tie.
    above = str(1 + Fraction(1, 2**24) + Fraction(1, 10**40))
    numerator, denominator = (int(part) for part in above.split("/"))
    text = f"1.{str((numerator - denominator) * 10**60 // denominator).zfill(60)}"
    assert float(text) == 1 + 2.0**-24
    assert read_operand(text).pattern.code == bits_of(1 + 2.0**-23)


@pytest.mark.parametrize(
    ("text", "source", "code"),
    [
        ("0xC0D0", FP16, 0xC0D0),
        ("0x7B", E5M2, 0x7B),
        ("2", BF16, 0x4000),
        ("2", E4M3, 0x40),
        ("inf", BF16, 0x7F80),
        ("-inf", FP16, 0xFC00),
        ("nan", E4M3, 0x7F),
        ("-NaN", BF16, 0xFFC0),
        ("500", E4M3, 0x7E),
    ],
)
def test_the_source_format_decides_values_and_patterns_of_its_width(text, source, code):
    operand = read_operand(text, source)
    assert (operand.pattern.fmt, operand.pattern.code) == (source, code)


@pytest.mark.parametrize("source", [FP16, FP32, E5M2])
def test_a_pattern_of_another_width_keeps_its_own_format(source):
    assert read_operand("0xC0968000", source).pattern.fmt is FP32
    assert read_operand("bf16:C01A", source).pattern.fmt is BF16


@pytest.mark.parametrize(("text", "sign"), [("inf", 0), ("-inf", 1), ("+Infinity", 0), ("-INF", 1)])
def test_infinity(text, sign):
    pattern = read_operand(text).pattern
    assert pattern.code == 0x7F800000 | sign << 31
    assert pattern.value is None


def test_beyond_the_range_is_rounded_to_infinity():
    operand = read_operand("1e40")
    assert operand.pattern.number == math.inf
    assert operand.is_rounded
    assert operand.written == 10**40


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1_000",
        "1,5",
        "1/3",
        "0x12345",
        "0b101",
        "bf16:12",
        "bf16:C01A0",
        "bf16:",
        "fp24:1234",
        "-0xC01A",
        "+0xC01A",
        "0xC01G",
        "--3",
        "e5",
        "1e",
        "0x1.8p",
        "1e99999999999999999999",
        "1e5001",
        "0x1p-5001",
        "infinit",
        "0b",
        "0x",
        "\u0663",
        "\N{EN DASH}1",
        "9" * 1201,
        "z" * 1200,
        "1\n2",
    ],
)
def test_what_is_no_operand_is_refused_in_one_line(text):
    with pytest.raises(InputError) as refusal:
        read_operand(text)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 250


def test_infinity_of_a_format_without_one_is_refused():
    with pytest.raises(InputError, match="e4m3 has no infinity"):
        read_operand("inf", E4M3)


@given(st.data())
def test_every_code_reads_back_from_every_form(data):
    fmt = data.draw(st.sampled_from(FORMATS))
    code = data.draw(st.integers(0, (1 << fmt.bits) - 1))
    digits = fmt.bits // 4
    for text in (
        f"{fmt.name}:{code:0{digits}x}",
        f"0x{code:0{digits}X}",
        f"{code:0{fmt.bits}b}",
        f"0b{code:0{fmt.bits}b}",
    ):
        assert read_operand(text, fmt).pattern.code == code


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_python_floats_read_back_exactly(value):
    for text in (repr(value), value.hex()):
        operand = read_operand(text)
        assert operand.pattern.code == bits_of(value)
        assert not operand.is_rounded or text == repr(value)


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=1000), st.integers(0, 30))
def test_decimals_are_exact(value, places):
    scaled = int(value * 10**places)
    text = f"{'-' if scaled < 0 else ''}{abs(scaled)}e-{places}"
    assert read_operand(text, FP64).written == Fraction(scaled, 10**places)
