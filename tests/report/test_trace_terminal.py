"""The terminal report of trace-head: goldens, bounds, encodings, what must be said, what to run next."""

import io
import math
import re
import shlex
import struct
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bf16forensics.recipe.derive import resolve
from bf16forensics.report.trace.advice import next_commands
from bf16forensics.report.trace.terminal import render_trace, show_trace
from bf16forensics.report.trace.words import (
    aligned_sum,
    bound_share,
    bound_words,
    exists_words,
    fit,
    jumps_words,
    ties_words,
)


def flat(text):
    return " ".join(text.split())


def lines_of(text, first, count):
    """`count` lines after the one that begins with `first`."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(first))
    return lines[at + 1 : at + 1 + count]


@pytest.mark.parametrize(("width", "encoding"), [(80, "ascii"), (80, "utf-8"), (100, "utf-8")])
def test_golden_reports(traces, fakes, repository, width, encoding):
    text = render_trace(traces.trace(), traces.context(), width=width, encoding=encoding)
    assert max(map(cell_len, text.splitlines())) <= width
    assert text.count("\n") <= 95
    fakes.check_golden(repository / "tests" / "golden" / f"trace-{width}-{encoding}.txt", text)


def test_golden_report_without_a_gradient(traces, fakes, repository):
    text = render_trace(traces.without_gradient(), traces.context(case=None, command=()), width=80)
    fakes.check_golden(repository / "tests" / "golden" / "trace-forward.txt", text)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp1253", None, "no-such-encoding"])
@pytest.mark.parametrize("width", [0, 80, 100, 500])
def test_lines_fit_and_can_be_encoded(traces, encoding, width):
    context = traces.context(shape="ünï 層 [bold]x[/bold]")
    text = render_trace(traces.trace(), context, width=width, encoding=encoding)
    # Escapes of what a stream lacks are longer than what they stand for; they are in the header alone.
    body = text[text.index("\n\n") :]
    assert max(map(cell_len, body.splitlines())) <= min(max(width, 80), 120)
    name = "ascii" if encoding in (None, "no-such-encoding") else encoding
    assert text.encode(name).decode(name) == text
    assert "[bold]x[/bold]" in flat(text)
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_extreme_numbers_stay_in_their_columns(traces):
    huge = traces.cumulative(p_bar=np.full(160, 1.17549435e-38, np.float32), v=np.full(160, -3.3895314e38, np.float32))
    token = traces.token(99_999, 999_999, step=9_999_999, delta_err=-1.7976931348623157e308, defect=5e-324)
    trace = traces.trace(cumulative=huge, tokens=(token,), traced=token, token=traces.token_trace(token, 256))
    assert max(map(cell_len, render_trace(trace, traces.context(), width=80).splitlines())) <= 80


def test_what_the_report_must_say(traces):
    text = flat(render_trace(traces.trace(), traces.context()))
    for part in (
        "sha256 01234567",
        "fa2 (version 1; reference fp64, activations amp-bf16)",
        "bf16forensics 0.1.0, torch 2.13.0, NumPy 2.2.0",
        "scale 0.176777, causal (bottom-right)",
        "L1.H2, counted from 0 (the paper's layer 2, head 3); 2 of 96 sequences of 64 queries, 32 features",
        "feature 20 of token 50 of sequence 3 (step 401) over 160 visible keys",
        "by fp32-prefix (walk of fa2+tile_k=all)",
        "bounded by half an ulp, and nothing accumulates",
        "2 of the ten largest jumps sit at P̄ = 1, which 9 of 160 keys have",
        "3 of 160 running values exist in the computation modelled",
        "-0.453125 from the accumulator's end, -0.453125 by the recipe, -0.453812346 in high precision",
        "mean error +0.249 ulp, law +0.124 (+ away from 0); 50 % halfway, 97 % of the residues",
        "the row has 4 padding rows beside it",
    ):
        assert part in text
    assert text.count("the paper's layer 2, head 3") == 1


def test_the_sums_of_the_head(traces):
    trace = traces.trace()
    rows = trace.delta_err[np.isfinite(trace.delta_err)]
    text = flat(render_trace(trace, traces.context()))
    assert f"summed over 124 rows: {math.fsum(rows):.4g}".replace("e-0", "e-") in text
    assert f"{(rows > 0).sum()} up" in text


def test_tokens_are_listed_in_order_and_counted(traces):
    trace = traces.trace()
    text = render_trace(trace, traces.context(), top=4)
    shown = lines_of(text, "seq ", 5)
    assert [(int(line.split()[0]), int(line.split()[2])) for line in shown[:4]] == [
        (token.sequence, token.token) for token in trace.tokens[:4]
    ]
    assert shown[4] == "4 of 124 rows; up to 30 are in the JSON document"
    # The fourth has no count of ones, because the anchor is not the maximum; the fifth has a sign that does not count.
    assert shown[3].split()[6] == "-"
    assert "(-2.66e-9)" in render_trace(trace, traces.context(), top=5)
    assert "order of an FP32 sum" not in text
    assert "order of an FP32 sum" in flat(render_trace(trace, traces.context(), top=5))


def test_top_zero_leaves_the_sums_and_the_chart(traces):
    text = render_trace(traces.trace(), traces.context(), top=0)
    assert "seq " not in text
    assert "sum of dO * error, 32 features" in text
    assert "┤" in text


def test_steps_that_nobody_knows_have_no_column(traces):
    tokens = tuple(traces.token(0, i, step=None) for i in range(3))
    text = render_trace(traces.trace(tokens=tokens, traced=tokens[0]), traces.context())
    assert "step" not in next(line for line in text.splitlines() if line.startswith("seq"))


def test_the_contributions_add_up_to_the_last_printed_digit(traces):
    trace = traces.trace()
    text = render_trace(trace, traces.context(), encoding="ascii")
    first, rest, total = (
        Decimal(next(line for line in text.splitlines() if line.startswith(start)).split()[-1])
        for start in ("sum of dO", "+ rounding of delta", "= error of delta")
    )
    assert first + rest == total
    assert float(first) == trace.token.contributions
    assert float(total) == trace.token.token.delta_err
    # The remainder is known to within the last digit of the others.
    assert abs(float(rest) - trace.token.remainder) <= 2e-16 * abs(trace.token.contributions)


@given(first=st.floats(-1e300, 1e300), total=st.floats(-1e300, 1e300))
def test_aligned_sums_add_up(first, total):
    texts = aligned_sum(first, total - first, total)
    one, rest, whole = map(Decimal, texts)
    assert one + rest == whole
    largest = max(abs(first), abs(total))
    # Seventeen digits name a float64: the larger of the two reads back as it was.
    assert float(whole if abs(total) == largest else one) == (total if abs(total) == largest else first)
    assert abs(float(one) - first) <= 1e-16 * largest
    assert len({text.partition("e")[2] for text in texts}) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_aligned_sums_of_what_is_not_finite(value):
    assert aligned_sum(1.5, value, value) == ("1.5", str(value), str(value))


@given(value=st.floats(allow_nan=False, allow_infinity=False), width=st.integers(7, 12))
def test_numbers_are_cut_to_their_columns(value, width):
    text = fit(value, width)
    # One digit, a sign and an exponent of three digits and a sign may be all that there is.
    assert len(text) <= max(width, 7)
    assert text.startswith("+") is (value > 0)
    if len(text) < width:
        assert float(text) == pytest.approx(value, rel=0.5, abs=0)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("fa2", "+ rounding of delta "),
        ("paper", "+ rounding of "),
        ("sdpa-math", "+ all else (delta does not come from O)"),
        ("fa2+delta_products=bf16", "+ rounding of dO * O and delta"),
    ],
)
def test_the_remainder_is_named_by_the_recipe(traces, recipe, words):
    assert words in render_trace(traces.trace(), traces.context(recipe=resolve(recipe)), encoding="ascii")


def test_features_signs_and_shares(traces):
    trace = traces.trace()
    text = render_trace(trace, traces.context())
    items = trace.token.features
    running = 0.0
    for line, item in zip(lines_of(text, "feature", 6), items[:6], strict=True):
        cells = line.split()
        running += item.contribution
        assert int(cells[0]) == item.feature
        for cell, value in zip(cells[1:7], (item.do, item.o_lp, item.o_hp, item.o_err, item.o_err_ulp), strict=False):
            assert float(cell) == pytest.approx(value, rel=5e-3)
        assert float(cells[7]) == pytest.approx(100 * running / trace.token.token.delta_err, rel=0.05)
    counts = {(s, e): 0 for s in (1, -1) for e in (1, -1)}
    for item in items:
        if item.do and item.o_err:
            counts[int(np.sign(item.do)), int(np.sign(item.o_err))] += 1
    above, below = lines_of(text, "signs", 2)
    for line, sign in ((above, 1), (below, -1)):
        numbers = [int(word) for word, after in zip(line.split(), line.split()[1:], strict=False) if "feature" in after]
        assert numbers == [counts[sign, 1], counts[sign, -1]]
    assert "1 feature with dO or error 0" in text


def test_a_sign_pair_without_features_says_none(traces):
    token = traces.trace().token
    few = tuple(item for item in token.features if item.do > 0 and item.o_err > 0)
    trace = traces.trace(token=replace(token, features=few, signs=traces.signs(few)))
    above, below = lines_of(render_trace(trace, traces.context()), "signs", 2)
    assert above.split()[-1] == "none"
    assert below.split()[-2:] == ["none", "none"]
    nothing = replace(token, features=few, signs=replace(traces.signs(()), zero=len(few)))
    assert "sign(error) not defined" in render_trace(traces.trace(token=nothing), traces.context())


def test_jumps_with_what_stands_before_and_after(traces):
    trace = traces.trace()
    cumulative = trace.cumulative
    rows = lines_of(render_trace(trace, traces.context(), width=80), "key  ", 10)
    assert len(rows) == 10
    for line, jump in zip(rows, cumulative.jumps, strict=False):
        cells = line.split()
        error = [0.0, *cumulative.error]
        lp, hp = cumulative.running_lp[jump.position], cumulative.running_hp[jump.position]
        want = (jump.p_bar, jump.v, lp, hp, error[jump.position], error[jump.position + 1], jump.size)
        assert int(cells[0]) == jump.key
        for cell, value in zip(cells[1:8], want, strict=True):
            assert float(cell) == pytest.approx(value, rel=5e-3, abs=1e-9)
        marks = "".join(cells[8:])
        assert ("1" in marks, "|" in marks, "*" in marks) == (
            jump.is_one,
            bool(cumulative.tile_end[jump.position]),
            jump.exists,
        )


def test_an_error_that_never_changes(traces):
    exact = traces.cumulative(error=np.zeros(160), jumps=(), top_jumps=0, top_jumps_at_ones=0)
    text = render_trace(traces.trace(cumulative=exact), traces.context(command=()))
    assert "jumps     none: the error is 0 at every key" in text
    assert "bits" not in text


def test_the_bound_is_respected_exceeded_or_absent(traces):
    kept = traces.cumulative()
    share = max(abs(float(e)) / float(h) for e, h in zip(kept.error, kept.half_ulp, strict=True))
    assert bound_share(kept) == share
    assert 0.5 < share <= 1
    assert f"within half an ulp (largest {share:.4g} of it)" in bound_words(kept)
    broken = traces.cumulative(half_ulp=kept.half_ulp / 2, bound_exceeded=40)
    assert "EXCEEDED at 40 keys" in bound_words(broken)
    assert bound_share(broken) == pytest.approx(2 * share, rel=1e-15)
    free = traces.cumulative(half_ulp=None, bound_exceeded=None)
    assert bound_share(free) is None
    assert "errors of this accumulator add up" in bound_words(free)
    nowhere = traces.cumulative(half_ulp=np.full(160, math.nan), bound_exceeded=0)
    assert math.isnan(bound_share(nowhere))


def test_existing_values_are_counted(traces):
    every = traces.cumulative(exists=np.ones(160, dtype=bool))
    assert exists_words(every) == "all 160 running values exist in the computation modelled"


def test_ties_of_the_unnormalised_output_and_none(traces):
    assert "O-bar over 32 features, 3 keys at P-bar = 1" in ties_words(traces.ties(point="o_bar", ones=3), "P-bar")
    assert "ties " not in render_trace(traces.trace(ties=None), traces.context())


def test_more_notes_than_there_is_room_for(traces):
    text = render_trace(traces.trace(notes=tuple(f"note number {i}" for i in range(15))), traces.context())
    assert "note number 11" in text
    assert "and 3 more notes in the JSON document" in text
    assert "note number 12" not in text


def test_notes_of_a_case_leave_room_for_those_of_the_trace(traces):
    # What a case says of a head (three notes at most), a row that is not kept, and all that a trace says of a recipe.
    said = (
        "no --layer and --head: L1.H2, which ranks first in the case",
        "captured again from the inputs of the case, whose hashes are the same",
        "the case was made with torch 2.12.0, captured again with 2.13.0: last bits may differ",
        "the tensors were captured under the case's own recipe, fa2+o_bar=bf16,tile_k=64; recipe fa3-fp8+o=fp32 is "
        "applied to these, and the row is not kept in the case",
        "only the rows around the traced token were computed: tokens are not ranked, sums are of one row",
        "recipe fa3-fp8+o=fp32 takes delta from dP * P, not from O: the contributions of O's errors are what they "
        "would be in a delta from O, and the remainder is everything else",
        "recipe fa3-fp8+o=fp32 shares the factor of q among the 4 query heads of a key/value head; here it is taken "
        "over the traced head alone, so that numbers may differ from those of localize",
    )
    model = "2 layers, 4 heads, 2 key/value heads, head size 32, width 128, weights bf16"
    text = render_trace(traces.trace(notes=said), traces.context(shape=model), width=80)
    flat = " ".join(text.split())
    assert all(part in flat.replace("note ", "") for part in said)
    assert "stored bf16" in flat


@pytest.mark.parametrize(
    ("at_one", "words"), [(0, "the one jump does not sit at P̄ = 1, which"), (1, "the one jump sits at P̄ = 1, which")]
)
def test_a_single_jump_in_words(traces, at_one, words):
    text = jumps_words(traces.trace(cumulative=traces.cumulative(top_jumps=1, top_jumps_at_ones=at_one)), "P̄")
    assert text.startswith(words)


@pytest.mark.parametrize("with_do", [True, False])
def test_no_error_of_delta_is_told_apart(traces, with_do):
    if with_do:
        # A recipe without a backward pass, over a record with dO.
        token = traces.token_trace()
        token = replace(token, token=replace(token.token, delta_err=math.nan), remainder=math.nan)
        trace = traces.without_gradient(token=token)
    else:
        trace = traces.without_gradient()
    text = render_trace(trace, traces.context())
    assert ("the recipe has no backward pass" in text, "there is no dO" in text) == (with_do, not with_do)
    assert ("sum of dO * error" in text) is with_do
    assert "= error of" not in text
    assert re.search(r"\bnan\b", text) is None


def test_the_next_command_names_the_largest_jump_in_the_case(traces):
    trace = traces.trace()
    jump = trace.cumulative.jumps[0]
    bits, rerun = next_commands(trace, traces.context(case="my case:x"))
    assert shlex.split(bits) == [
        "bf16forensics",
        "bits",
        "--event",
        f"my case:x:L1.H2:s3:t50:f20:k{jump.key}",
    ]
    assert rerun == "bf16forensics trace-head case --layer 1 --head 2 --accumulator sm90"
    other = traces.trace(cumulative=traces.cumulative(accumulator="exact"))
    (bits,) = next_commands(other, traces.context())
    assert bits.endswith("--accumulator exact")


@pytest.mark.parametrize("keeps_row", [False, None])
def test_without_a_row_in_a_case_the_patterns_are_given(traces, keeps_row):
    context = traces.context(case=None) if keeps_row is None else traces.context(keeps_row=False)
    trace = traces.trace()
    cumulative, jump = trace.cumulative, trace.cumulative.jumps[0]
    before = float(cumulative.running_hp[jump.position - 1])
    added = jump.p_bar * jump.v
    words = shlex.split(next_commands(trace, context)[0])
    assert words[:2] == ["bf16forensics", "bits"]
    assert [struct.unpack(">f", bytes.fromhex(word.removeprefix("0x")))[0] for word in words[2:]] == [before, added]
    stored = traces.trace(cumulative=traces.cumulative(accumulator="bf16-each-add"))
    words = shlex.split(next_commands(stored, context)[0])
    first = struct.unpack(">f", bytes.fromhex(words[2].removeprefix("0x")))[0]
    assert first == float(cumulative.running_lp[jump.position - 1])
    assert words[4:] == ["--accumulator", "bf16-each-add"]


def test_patterns_start_from_zero_at_the_first_key(traces):
    error = np.zeros(160)
    error[0] = 1.0
    trace = traces.trace(
        cumulative=traces.cumulative(error=error, jumps=traces.with_jumps({**vars_of(traces), "error": error}).jumps)
    )
    words = shlex.split(next_commands(trace, traces.context(case=None))[0])
    assert words[2] == "0x00000000"


def vars_of(traces):
    """The fields of the made-up cumulative trace, without its jumps."""
    cumulative = traces.cumulative()
    names = [name for name in cumulative.__slots__ if name not in ("jumps", "top_jumps", "top_jumps_at_ones")]
    return {name: getattr(cumulative, name) for name in names}


@pytest.mark.parametrize("accumulator", ["exact", "sm80", "sm90", "sm100", "tile:64"])
def test_what_is_not_one_fp32_addition_has_no_patterns(traces, accumulator):
    trace = traces.trace(cumulative=traces.cumulative(accumulator=accumulator))
    assert next_commands(trace, traces.context(case=None)) == ()


def test_patterns_round_to_the_format_of_the_recipe(traces):
    trace, context = traces.trace(), traces.context(case=None, command=())
    of = {name: next_commands(trace, replace(context, recipe=resolve(name))) for name in ("fa2+o=fp16", "fa2+o=fp32")}
    assert of["fa2+o=fp16"][0].endswith(" --to fp16")
    assert of["fa2+o=fp32"] == ()
    assert "--to" not in next_commands(trace, replace(context, recipe=resolve("fa2+o=fp32,o_bar=bf16")))[0]


def test_a_matrix_unit_is_proposed_only_where_it_multiplies(traces):
    trace = traces.trace()
    for recipe, proposed in (("fa2", True), ("fa2+p_bar=fp32", False), ("fa2+p_bar=fp16", True)):
        steps = next_commands(trace, traces.context(recipe=resolve(recipe)))
        assert any("sm90" in step for step in steps) is proposed


def test_show_writes_what_render_returns(traces, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    show_trace(traces.trace(), traces.context(), top=3, stream=stream)
    text = stream.buffer.getvalue().decode("ascii")
    assert text == render_trace(traces.trace(), traces.context(), top=3, width=90, encoding="ascii")


@pytest.mark.parametrize("keys", [1, 2, 3, 5000])
def test_any_number_of_keys(traces, keys):
    text = render_trace(traces.trace(cumulative=traces.cumulative(keys)), traces.context(), width=80)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert ("one jump" in text) is (keys == 1)
