"""Numbers as printed, and commands that can be run again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.verdict.advice import case_of, rerun
from bf16forensics.verdict.judge import judge
from bf16forensics.verdict.words import about, count, listing, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.00183779, "-0.00184"),
        (1.234e-5, "1.23e-5"),
        (1536.0, "1.54e3"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_numbers_read_back_to_three_digits(value):
    # Half a unit of the third digit: at most 0.5 % of the value.
    assert float(number(value)) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize(("value", "text"), [(7, "7"), (99, "99"), (101, "110"), (1200, "1,200"), (1201, "1,300")])
def test_sequences_are_rounded_up_to_two_digits(value, text):
    assert about(value) == text


@given(st.integers(min_value=1, max_value=10**12))
def test_rounding_up_never_promises_too_little(value):
    rounded = int(about(value).replace(",", ""))
    assert value <= rounded <= value * 1.1


def test_lists_and_counts():
    assert listing(["a", "b", "c"], 2) == "a, b and 1 more"
    assert listing(["a"], 2, total=1500) == "a and 1,499 more"
    assert listing([], 2) == ""
    assert (count(1, "head"), count(1536, "head"), count(2, "is", "are")) == ("1 head", "1,536 heads", "2 are")
    assert (percent(0.256), percent(math.nan)) == ("26 %", "nan")
    assert (percent(1.0), percent(-0.078), percent(0.0996), percent(12.5)) == ("100 %", "-7.8 %", "10 %", "1,250 %")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], "bf16forensics localize ... --recipe fa2+o=fp32"),
        (["b", "x", "--recipe", "paper", "-o", "c", "--json"], "b x --recipe fa2+o=fp32"),
        (["b", "x", "--recipe=paper", "--output=c", "--force", "--top", "3"], "b x --top 3 --recipe fa2+o=fp32"),
        (["b", "a b;rm"], "b 'a b;rm' --recipe fa2+o=fp32"),
    ],
)
def test_a_command_is_repeated_with_one_option_set(command, expected):
    assert rerun(command, "--recipe", "fa2+o=fp32") == expected


@pytest.mark.parametrize(
    ("command", "case"),
    [
        ([], None),
        (["b", "localize", "x"], None),
        (["b", "-o", "c d", "x"], "c d"),
        (["b", "x", "--output", "c"], "c"),
        (["b", "x", "--output=c=d"], "c=d"),
        (["b", "-o", "first", "-o", "last"], "last"),
        (["b", "x", "-o"], None),
    ],
)
def test_the_case_that_a_command_wrote(command, case):
    assert case_of(command) == case


def test_the_first_head_of_the_verdict_is_to_be_traced_where_a_case_was_written(fakes):
    result = fakes.mixed()
    command = ["bf16forensics", "localize", "ckpt.pt", "-o", "my case"]
    judgement = judge(result, command=command)
    verdicts = {(head.layer, head.head): head.verdict for head in judgement.heads}
    layer, head = next(key for key in judgement.ranking if verdicts[key] == judgement.verdict)
    trace = f"bf16forensics trace-head 'my case' --layer {layer} --head {head}"
    assert judgement.next_commands[1] == trace
    assert len(judgement.next_commands) <= 4
    assert judgement.next_commands[-1].startswith("bf16forensics explain")
    without = judge(result, command=command[:-2]).next_commands
    assert not any("trace-head" in step for step in without)


def test_options_can_be_left_out():
    assert rerun(["b", "--lines", "0:2", "x", "--sequences=4"], "-u", without=("--lines", "--sequences")) == "b x -u"


def test_a_flag_is_set_once():
    assert rerun(["b", "--until-decided", "x"], "--until-decided") == "b x --until-decided"
