"""trace-head on a trained checkpoint: sums, the published picture of jumps, and an accumulator of a matrix unit."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Run = Callable[..., Any]
SEQUENCES, TOKENS, FEATURES = 4, 512, 64


@pytest.fixture(scope="module")
def arguments() -> list[object]:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "diverging-gpt"
    if not folder.exists():
        pytest.skip("real data 'diverging-gpt' is not present beside the repository")
    given: list[object] = [folder / "ckpt.pt", "--batch", folder / "train.bin"]
    return [*given, "--indices", folder / "generated_indices_rank_0.txt", "--lines", "0:1", "--sequences", SEQUENCES]


@pytest.fixture
def trace(run_cli: Run) -> Callable[..., dict[str, Any]]:
    def of(*args: object) -> dict[str, Any]:
        result = run_cli(["trace-head", *args, "--json"])
        assert (result.exit_code, result.stderr) == (0, ""), result.stderr
        return dict(json.loads(result.stdout))

    return of


@pytest.fixture(scope="module")
def case(arguments: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bf16forensics.__main__ import main

    folder = tmp_path_factory.mktemp("real") / "case"
    assert main(["localize", *map(str, arguments), "--reference", "fp64", "-o", str(folder)]) in (0, 1)
    return folder


@pytest.mark.parametrize(("layer", "head"), [(4, 3), (0, 0)])
def test_the_sums_of_a_head_are_those_of_the_case(trace: Run, case: Path, layer: int, head: int) -> None:
    document = trace(case, "--layer", layer, "--head", head, "--recapture")
    run = json.loads((case / "case.json").read_text())
    expected = next(item for item in run["heads"] if (item["layer"], item["head"]) == (layer, head))["delta_err"]
    found = document["head"]
    assert found["rows"] == SEQUENCES * TOKENS
    assert (found["positive"], found["negative"]) == (expected["positive"], expected["negative"])
    # Two orders of a float64 sum of 2,048 terms.
    size = math.sqrt(expected["zero"] + expected["positive"] + expected["negative"]) * expected["standard_error"]
    assert found["delta_err_sum"] == pytest.approx(expected["sum"], abs=2048**2 * 2**-53 * size)
    token = document["token"]
    assert len(token["features"]) == FEATURES
    assert math.fsum(item["contribution"] for item in token["features"]) == token["contributions"]
    assert token["contributions"] + token["remainder"] == pytest.approx(
        token["token"]["delta_err"], abs=2**-52 * abs(token["token"]["delta_err"])
    )


def test_a_kept_head_is_the_captured_one(trace: Run, case: Path) -> None:
    run = json.loads((case / "case.json").read_text())
    layer, _, head = run["ranking"][0].removeprefix("L").partition(".H")
    kept = trace(case)
    count = len(kept["head"]["sequences"])
    again = trace(case, "--layer", layer, "--head", head, "--recapture", "--sequences", count)
    for name in ("head", "tokens", "token", "traced", "cumulative", "jumps", "ties"):
        assert kept[name] == again[name], name


def test_prefix_errors_are_bounded_and_exist_at_tile_ends_only(trace: Run, case: Path) -> None:
    cumulative = trace(case, "--layer", 4, "--head", 3)["cumulative"]
    arrays = cumulative["arrays"]
    assert cumulative["bound_exceeded"] == 0
    assert all(abs(error) <= bound for error, bound in zip(arrays["error"], arrays["half_ulp"], strict=True))
    exists = [key for key, there in zip(arrays["keys"], arrays["exists"], strict=True) if there]
    ends = [key for key, there in zip(arrays["keys"], arrays["tile_end"], strict=True) if there]
    assert set(exists) <= set(ends)
    # Tiles of 128 keys: every border, and the row's own last key.
    assert set(ends) == {*range(127, arrays["keys"][-1], 128), arrays["keys"][-1]}


def test_a_matrix_unit_truncates(trace: Run, case: Path) -> None:
    row = trace(case, "--layer", 4, "--head", 3)["traced"]
    place = ("--layer", 4, "--head", 3, "--sequence", row["sequence"], "--token", row["token"])
    cumulative = trace(case, *place, "--accumulator", "sm90")["cumulative"]
    arrays = cumulative["arrays"]
    assert cumulative["half_ulp"] is None if "half_ulp" in cumulative else arrays["half_ulp"] is None
    largest = max(map(abs, arrays["running_hp"]))
    blocks = math.ceil(len(arrays["keys"]) / 16) + 1
    # A block cuts 16 products and the sum below 2^-25 of the largest of them, and its result below 2^-23 of itself.
    largest = max(largest, *(abs(p * v) for p, v in zip(arrays["p_bar"], arrays["v"], strict=True)))
    assert max(map(abs, arrays["error"])) <= blocks * (17 * 2**-24 + 2**-22) * largest
    # The final rounding of O to BF16 hides it, or moves O by one step.
    assert abs(cumulative["o_accumulator"] - cumulative["o_lp"]) <= 2**-7 * abs(cumulative["o_lp"])
