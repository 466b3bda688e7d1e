"""The judgement of a run: overall verdict, findings, exit code, next steps."""

import math
from dataclasses import replace

import pytest

from bf16forensics.recipe.derive import resolve
from bf16forensics.recipe.presets import PAPER
from bf16forensics.verdict.catalogue import entries
from bf16forensics.verdict.findings import SEVERITIES, VERDICTS
from bf16forensics.verdict.judge import exit_code, judge
from bf16forensics.verdict.thresholds import Thresholds


def _codes(judgement):
    return [finding.code for finding in judgement.findings]


def _one(judgement, code):
    (found,) = [finding for finding in judgement.findings if finding.code == code]
    return found


@pytest.fixture
def heads_by_verdict(fakes):
    return {
        "compounding bias": fakes.head(0, 0, dw_q=fakes.biased()),
        "rounding noise above sampling noise": fakes.head(0, 1, dw_q=fakes.coupling(defect=fakes.errors(rho=2.0))),
        "bias without coupling": fakes.head(0, 2, delta_defect=fakes.signed(p=1e-6)),
        "cannot judge": fakes.head(0, 3, dw_q=fakes.coupling(sequences=2)),
        "noise at chance level": fakes.head(0, 4),
    }


def test_the_most_serious_head_decides(fakes, heads_by_verdict):
    for index, verdict in enumerate(VERDICTS):
        heads = [heads_by_verdict[name] for name in VERDICTS[index:]]
        judgement = judge(fakes.result(*heads))
        assert judgement.verdict == verdict
        assert judgement.summary.startswith(f"{verdict}: ")
        assert "recipe fa2 against fp64" in judgement.summary
        assert dict(judgement.counts()) == {name: int(name in VERDICTS[index:]) for name in VERDICTS}


def test_no_head_is_cannot_judge(fakes):
    judgement = judge(fakes.result())
    assert judgement.verdict == "cannot judge"
    assert _codes(judgement) == ["BF904"]
    assert judgement.heads == judgement.ranking == ()
    assert exit_code(judgement, "warning") == 0


def test_heads_are_in_order_and_the_ranking_is_not(fakes):
    loud = fakes.coupling(defect=fakes.errors(rho=0.9))
    judgement = judge(fakes.result(fakes.head(1, 1, dw_q=loud), fakes.head(0, 1), fakes.head(0, 0)))
    assert [(head.layer, head.head) for head in judgement.heads] == [(0, 0), (0, 1), (1, 1)]
    assert judgement.ranking == ((1, 1), (0, 0), (0, 1))


def test_all_noise_has_no_finding_and_nothing_to_run(fakes):
    judgement = judge(fakes.result(fakes.head()))
    assert judgement.findings == judgement.next_commands == ()
    assert judgement.not_checked


def test_the_mixed_run_has_a_finding_of_each_kind_sorted_by_severity(fakes):
    judgement = judge(fakes.mixed())
    assert _codes(judgement) == [
        *("BF301", "BF401"),
        "BF302",
        *("BF101", "BF103", "BF201", "BF403", "BF902", "BF903"),
    ]
    ranks = [SEVERITIES.index(finding.severity) for finding in judgement.findings]
    assert ranks == sorted(ranks, reverse=True)


def test_a_compounding_bias_carries_its_numbers_and_the_flip_to_try(fakes):
    found = _one(judge(fakes.mixed(), command=fakes.COMMAND), "BF301")
    assert (found.layer, found.head, found.heads, found.num_heads) == (1, 0, ("L1.H0",), 1)
    for number in ("B 3 ", "2.1", "3.6", "harmless 1", "0.0005", "|dW_Q| 52.5", "fa2 against fp64", "820 up"):
        assert number in found.observed
    assert found.next_command == (
        "bf16forensics localize 'run 7/ckpt.pt' --batch train.bin --indices indices_rank_0.txt --lines 0:2 "
        "--recipe fa2+o=fp32"
    )
    assert found.would_refute


@pytest.mark.parametrize(
    ("recipe", "flip"),
    [("paper", "paper+o_bar=fp32"), ("fa2+o_bar=bf16", "--recipe fa2"), ("sdpa-math", "sdpa-math+o=fp32")],
)
def test_the_flip_is_of_the_recipe_at_hand(fakes, recipe, flip):
    judgement = judge(fakes.result(fakes.head(dw_q=fakes.biased()), recipe=resolve(recipe)))
    assert _one(judgement, "BF301").next_command.endswith(flip)


def test_a_recipe_of_a_file_has_no_flip_by_name(fakes):
    recipe = replace(PAPER, name="mine")
    judgement = judge(fakes.result(fakes.head(dw_q=fakes.biased()), recipe=recipe))
    assert _one(judgement, "BF301").next_command == "bf16forensics explain BF301"


@pytest.mark.parametrize(
    ("shares", "words", "point"),
    [
        ({"share_scores": 0.9}, "the scores", None),
        ({"share_cast_ds": 0.8}, "the cast of dS", "fa2+ds=fp32"),
        ({"share_cast_dq": 0.8}, "the cast of dQ", "fa2+dq=fp32"),
        ({"share_scores": math.nan, "share_cast_dq": 0.8}, "the cast of dQ", "fa2+dq=fp32"),
    ],
)
def test_a_bias_elsewhere_names_the_largest_share(fakes, shares, words, point):
    telescope = replace(fakes.coupling().telescope, **shares)
    biased = fakes.errors(bias=2.0, bias_lower=1.5, bias_upper=2.5, p_adjusted=0.01)
    head = fakes.head(dw_q=fakes.coupling(total=biased, telescope=telescope))
    found = _one(judge(fakes.result(head)), "BF303")
    assert found.severity == "error"
    assert words in found.message
    assert found.next_command.endswith(point or "explain BF303")


def test_the_delta_bias_is_told_where_the_coupling_is_unknown_or_undecided(fakes):
    biased = fakes.signed(p=1e-6)
    for dw_q, code in (
        (None, "BF906"),
        (fakes.coupling(defect=fakes.errors(n_effective=2.0)), "BF902"),
        (fakes.coupling(defect=fakes.errors(bias_upper=2.0)), "BF903"),
    ):
        judgement = judge(fakes.result(fakes.head(dw_q=dw_q, delta_defect=biased)))
        assert _codes(judgement) == ["BF201", code]
        assert judgement.verdict == "cannot judge"
        assert exit_code(judgement, "warning") == 1


def test_without_dw_q_a_quiet_delta_is_no_finding(fakes):
    assert _codes(judge(fakes.result(fakes.head(dw_q=None)))) == ["BF906"]


@pytest.mark.parametrize(
    ("repeated", "near", "words"),
    [(1000, 512, "at chance level"), (1000, 412, "not at"), (1000, 413, " at"), (1000, 700, "not at"), (4, 4, " at")],
)
def test_repeated_maxima_are_compared_with_a_flat_density(fakes, repeated, near, words):
    head = fakes.head(counts=fakes.counts(rows_repeated_max=repeated, rows_near_max=near))
    found = _one(judge(fakes.result(head)), "BF101")
    assert found.severity == "note"
    assert ("not at chance level" in found.message) is (words == "not at")
    assert "0.51 for scores of flat density" in found.observed


def test_repeated_maxima_are_one_finding_with_the_worst_heads_named(fakes):
    heads = [fakes.head(0, n, counts=fakes.counts(rows_repeated_max=n, rows_near_max=n // 2)) for n in range(40)]
    found = _one(judge(fakes.result(*heads, recipe=PAPER)), "BF101")
    assert found.num_heads == 39
    assert found.heads[:2] == ("L0.H39", "L0.H38")
    assert len(found.heads) == 12
    assert "L0.H39" in found.message
    assert "scores in BF16" in found.inferred


def test_a_trigger_alone_is_a_note(fakes):
    head = fakes.head(counts=fakes.counts(rows_repeated_max=900, rows_near_max=900, swamped_power_share=0.5))
    judgement = judge(fakes.result(head))
    assert judgement.verdict == "noise at chance level"
    assert _codes(judgement) == ["BF101", "BF102"]
    assert [exit_code(judgement, level) for level in SEVERITIES] == [1, 0, 0]


@pytest.mark.parametrize(("share", "found"), [(0.0999, False), (0.1, True), (math.nan, False)])
def test_swamped_rows_are_told_when_they_carry_the_error(fakes, share, found):
    judgement = judge(fakes.result(fakes.head(counts=fakes.counts(swamped_power_share=share))))
    assert ("BF102" in _codes(judgement)) is found


def test_unlabelled_and_padding_rows_are_counted_apart(fakes):
    head = fakes.head(counts=fakes.counts(rows_repeated_max=9, rows_repeated_max_unlabelled=4, rows_padding=3))
    found = _one(judge(fakes.result(head)), "BF103")
    assert "4 of 9 rows" in found.message
    assert "padding rows, left out of every count, 3" in found.observed
    clean = judge(fakes.result(fakes.head(counts=fakes.counts(rows_repeated_max=9))))
    assert "BF103" not in _codes(clean)


def test_non_finite_inputs_name_tensors_and_exit_2_while_the_rest_is_judged(fakes):
    heads = [fakes.head(0, n, nonfinite=("k[0, 3, 7, 1]", "v[0, 0, 0, 0]")) for n in range(4)]
    judgement = judge(fakes.result(*heads, fakes.head(1, 0)))
    found = _one(judgement, "BF401")
    assert "L0.H0 k[0, 3, 7, 1]" in found.message
    assert "and 3 more" in found.message
    assert judgement.heads[-1].verdict == "noise at chance level"
    assert [exit_code(judgement, level) for level in SEVERITIES] == [2, 2, 2]


def test_a_zero_projection_is_a_warning(fakes):
    spectrum = replace(fakes.head().spectrum, w_q_spectral_norm=0.0, w_q_all_zero=True)
    judgement = judge(fakes.result(fakes.head(spectrum=spectrum), fakes.head(0, 1, spectrum=None)))
    assert _one(judgement, "BF402").heads == ("L0.H0",)
    assert [exit_code(judgement, level) for level in SEVERITIES] == [1, 1, 0]


def test_unused_tensors_are_a_bounded_note(fakes):
    names = tuple(f"h.{layer}.attn.q_norm.weight" for layer in range(48))
    found = _one(judge(fakes.result(fakes.head(), unused_tensors=names)), "BF403")
    assert "and 43 more" in found.message
    assert found.num_heads == 0


def _forward_only(fakes, number=0, **fields):
    """A head of a run without dO."""
    return fakes.head(0, number, delta_err=None, delta_defect=None, ds_row_sum=None, dw_q=None, **fields)


def test_a_model_without_output_head_gives_forward_evidence_and_exit_2(fakes):
    why = "no output head: lm_head.weight is in no file"
    run = fakes.result(_forward_only(fakes), _forward_only(fakes, 1), no_gradient=why, no_output_head=True)
    judgement = judge(run)
    assert [(head.verdict, head.code, head.reason) for head in judgement.heads] == [("cannot judge", "BF404", why)] * 2
    assert _codes(judgement).count("BF404") == 1
    assert "BF905" not in _codes(judgement)
    assert [exit_code(judgement, level) for level in SEVERITIES] == [2, 2, 2]
    assert f"the backward pass: {why}" in judgement.not_checked


def test_a_forward_only_recipe_is_no_fault_of_the_input(fakes):
    why = "recipe fa3-fp8 is a forward pass only: outputs were compared, gradients were not"
    judgement = judge(fakes.result(_forward_only(fakes), no_gradient=why))
    assert [(head.code, head.reason) for head in judgement.heads] == [("BF905", why)]
    assert [exit_code(judgement, level) for level in SEVERITIES] == [1, 0, 0]
    assert "use a recipe with a backward pass" in _one(judgement, "BF905").next_command


def test_a_recipe_that_anchors_elsewhere_counts_no_ones_and_says_so(fakes):
    counts = fakes.counts(rows_repeated_max=None, rows_repeated_max_unlabelled=None, most_ones=None)
    heads = [fakes.head(0, number, ones=None, counts=counts) for number in range(3)]
    judgement = judge(fakes.result(*heads, recipe=resolve("fa4")))
    assert "recipe fa4 does not anchor rows at their maximum" in _one(judgement, "BF104").message
    assert not {"BF101", "BF103"} & set(_codes(judgement))
    assert judgement.verdict == "noise at chance level"
    assert judgement.ranking == ((0, 0), (0, 1), (0, 2))


def test_cannot_judge_by_itself_exits_0(fakes):
    judgement = judge(fakes.result(fakes.head(dw_q=fakes.coupling(sequences=2))))
    assert judgement.verdict == "cannot judge"
    assert [exit_code(judgement, level) for level in ("warning", "error")] == [0, 0]
    with pytest.raises(ValueError, match="loud"):
        exit_code(judgement, "loud")


def test_the_number_of_sequences_that_would_decide_is_printed(fakes):
    undecided = fakes.coupling(sequences=16, defect=fakes.errors(bias_upper=1.9))
    found = _one(judge(fakes.result(fakes.head(dw_q=undecided))), "BF903")
    assert "needs about 58 sequences" in found.observed
    assert found.next_command == "bf16forensics localize ... --until-decided"


def test_more_sequences_come_from_where_the_run_has_them(fakes):
    few = fakes.head(dw_q=fakes.coupling(sequences=2))
    record = judge(fakes.result(few, kind="record"))
    assert _one(record, "BF901").next_command == "record about 16 sequences and localize again"
    part = judge(fakes.result(few), command=fakes.COMMAND)
    assert _one(part, "BF901").next_command == (
        "bf16forensics localize 'run 7/ckpt.pt' --batch train.bin --indices indices_rank_0.txt --until-decided"
    )
    whole = judge(fakes.result(few), command=("bf16forensics", "localize", "a.pt", "--batch", "b.npz"))
    assert _one(whole, "BF901").next_command.startswith("record more steps")


def test_what_was_not_checked_depends_on_the_run(fakes):
    forward = judge(fakes.result(fakes.head(delta_err=None, delta_defect=None, dw_q=None)))
    assert any("no dO" in item for item in forward.not_checked)
    record = judge(fakes.result(fakes.head(dw_q=None)))
    assert any("coupling to W_Q" in item for item in record.not_checked)
    stopped = judge(fakes.result(fakes.head(), sequences=5, sequences_planned=16, interrupted=True))
    assert any("11 of 16 sequences" in item for item in stopped.not_checked)
    assert any("unused" in item for item in judge(fakes.mixed()).not_checked)


@pytest.mark.parametrize("number", [1, 2, 13, 26, 1536])
def test_findings_are_bounded_whatever_the_number_of_heads(fakes, number):
    biased = fakes.errors(bias=2.0, bias_lower=1.5, bias_upper=2.5, p_adjusted=0.01)
    zero = replace(fakes.head().spectrum, w_q_all_zero=True)
    kinds = [
        {},
        {"dw_q": fakes.biased()},
        {"dw_q": fakes.coupling(total=biased)},
        {"dw_q": fakes.coupling(defect=fakes.errors(rho=2.0))},
        {"delta_defect": fakes.signed(p=1e-12)},
        {"nonfinite": ("k[0, 0, 0, 0]",)},
        {"counts": fakes.counts(rows=0)},
        {"delta_err": None, "delta_defect": None, "dw_q": None},
        {"dw_q": None},
        {"dw_q": fakes.coupling(sequences=3)},
        {"dw_q": fakes.coupling(defect=fakes.errors(n_effective=2.0))},
        {"dw_q": fakes.coupling(defect=fakes.errors(bias_upper=2.0))},
        {
            "spectrum": zero,
            "counts": fakes.counts(rows_repeated_max=9, rows_repeated_max_unlabelled=1, swamped_power_share=0.5),
        },
    ]
    heads = [fakes.head(index // 32, index % 32, **kinds[index % 13]) for index in range(number)]
    judgement = judge(fakes.result(*heads, unused_tensors=("a",)))
    assert len(judgement.findings) <= Thresholds().max_findings
    assert len(judgement.next_commands) <= 4
    if number >= 13:
        # With the fake kinds every code occurs, so this is the list of codes that the judge can emit: two of them
        # belong to the run and not to a head.
        headless = judge(fakes.result(_forward_only(fakes), no_gradient="no output head", no_output_head=True))
        uncounted = judge(fakes.result(fakes.head(ones=None), recipe=resolve("fa4")))
        emitted = [*_codes(judgement), *_codes(headless), *_codes(uncounted)]
        assert set(emitted) == {entry.code for entry in entries()}
    # No head is lost: single findings and the rest add up.
    expected = sum(head.code == "BF301" for head in judgement.heads)
    assert sum(finding.num_heads for finding in judgement.findings if finding.code == "BF301") == expected
    for finding in judgement.findings:
        assert len(finding.message) < 400
        assert len(finding.heads) <= 12


def test_two_heads_beyond_the_single_ones_share_a_finding(fakes):
    heads = [fakes.head(0, number, dw_q=fakes.biased()) for number in range(5)]
    found = [finding for finding in judge(fakes.result(*heads)).findings if finding.code == "BF301"]
    assert [finding.heads for finding in found] == [("L0.H0",), ("L0.H1",), ("L0.H2",), ("L0.H3", "L0.H4")]
    assert "and 2 more heads: L0.H3, L0.H4" in found[-1].message


def test_thresholds_can_be_given(fakes):
    head = fakes.head(dw_q=fakes.coupling(sequences=8))
    assert judge(fakes.result(head), Thresholds(min_sequences=8)).verdict == "noise at chance level"


def test_the_verdict_needs_no_tensor_library(run_python):
    code = (
        "import sys; import bf16forensics.verdict.judge, bf16forensics.report.terminal, bf16forensics.report.document, "
        "bf16forensics.report.case; print([name for name in ('torch', 'numpy', 'triton') if name in sys.modules])"
    )
    done = run_python(["-c", code])
    assert (done.exit_code, done.stdout.strip()) == (0, "[]"), done.stderr
