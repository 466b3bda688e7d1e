"""`bf16forensics demo`: the verdicts of both twins, what they rest on, and the flips that show the cause."""

import contextlib
import fnmatch
import importlib.util
import io
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bf16forensics.__main__ import main
from bf16forensics.commands import _demo_twins
from bf16forensics.commands._demo_twins import BUNDLED, HEALTHY, PLANTED
from bf16forensics.verdict.findings import BIAS_WITHOUT_COUPLING, CANNOT_JUDGE, COMPOUNDING_BIAS, NOISE_AT_CHANCE

ROOT = Path(__file__).resolve().parents[2]
BULLETS, NEVER = 6, 63
PLANTED_ROWS = slice(64, 96)


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def strict(text: str) -> dict[str, Any]:
    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Exit code, standard output and cases of `demo --json -o DIR`, run once."""
    directory = tmp_path_factory.mktemp("demo") / "cases"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        code = main(["demo", "--json", "-o", str(directory)])
    return code, stdout.getvalue(), directory


@pytest.fixture(scope="module")
def make_demo() -> ModuleType:
    specification = importlib.util.spec_from_file_location("make_demo", ROOT / "examples" / "make_demo.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def head_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (head for head in document["heads"] if head["name"] == name)
    return found


def state(name: str) -> dict[str, torch.Tensor]:
    return torch.load(BUNDLED / name, weights_only=True)["model"]


def localize_planted(recipe: str) -> dict[str, Any]:
    files = ["--batch", BUNDLED / "tokens.bin", "--indices", BUNDLED / "indices.txt"]
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        main([str(word) for word in ("localize", BUNDLED / "planted.pt", *files, "--recipe", recipe, "--json")])
    return strict(stdout.getvalue())


def test_json_is_one_strict_document_as_documented(both: tuple[int, str, Path]) -> None:
    code, stdout, _ = both
    document = strict(stdout)
    assert code == 0
    assert list(document)[:5] == ["schema_version", "tool", "command", "environment", "verdict"]
    assert document["verdict"] == "as documented"
    assert document["deviations"] == []
    assert list(document["twins"]) == ["planted", "healthy"]
    assert document["command"] == ["bf16forensics", "demo", "--json", *document["command"][3:]]


def test_planted_head_comes_first_and_alone(both: tuple[int, str, Path]) -> None:
    planted = strict(both[1])["twins"]["planted"]
    assert planted["recipe"]["name"] == "fa2"
    assert planted["verdict"] == COMPOUNDING_BIAS
    assert planted["ranking"][0] == "L1.H2"
    assert [(f["code"], f["heads"]) for f in planted["findings"] if f["severity"] != "note"] == [("BF301", ["L1.H2"])]
    assert [head["name"] for head in planted["heads"] if head["verdict"] != NOISE_AT_CHANCE] == ["L1.H2"]
    head = head_of(planted, "L1.H2")
    # Far from the threshold, so that another processor's last bits change nothing.
    assert head["dw_q"]["bias_lower"] > 20 * head["harmless_limit"]
    assert head["dw_q"]["p_adjusted"] < 0.01
    assert head["dw_q"]["n_effective"] > 30
    assert head["rows_repeated_max"] > head["rows"] / 2
    # dO and the error of O toward zero have the same sign as V: delta_lp comes out too small.
    assert head["delta_defect"]["clustered"]["t"] < -5


def test_healthy_twin_is_noise_by_the_upper_bound(both: tuple[int, str, Path]) -> None:
    healthy = strict(both[1])["twins"]["healthy"]
    assert healthy["verdict"] == NOISE_AT_CHANCE
    assert all(finding["severity"] == "note" for finding in healthy["findings"])
    for head in healthy["heads"]:
        assert head["verdict"] == NOISE_AT_CHANCE
        upper = max(head["dw_q"]["bias_upper"], head["dw_q"]["total"]["bias_upper"])
        assert upper < 0.5 * head["harmless_limit"]
        assert head["dw_q"]["sequences"] >= 16
        assert head["dw_q"]["n_effective"] > 20


def test_cases_are_those_of_localize(both: tuple[int, str, Path], run_cli: Callable[..., Any]) -> None:
    _, stdout, directory = both
    for name, twin in strict(stdout)["twins"].items():
        assert strict((directory / name / "case.json").read_text(encoding="utf-8")) == twin
        assert twin["command"][:2] == ["bf16forensics", "localize"]
    assert list((directory / "planted" / "tensors").iterdir())
    refused = run_cli(["demo", "--twin", "healthy", "-o", directory])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--force" in refused.stderr


@pytest.mark.parametrize("recipe", ["fa2+o=fp32", "fa2+delta_source=dp"])
def test_without_the_rounding_of_o_in_delta_the_finding_disappears(recipe: str) -> None:
    document = localize_planted(recipe)
    assert document["recipe"]["name"] == recipe
    assert "BF301" not in {finding["code"] for finding in document["findings"]}
    head = head_of(document, "L1.H2")
    assert head["verdict"] in (NOISE_AT_CHANCE, BIAS_WITHOUT_COUPLING, CANNOT_JUDGE)
    assert head["dw_q"]["bias_upper"] < head["harmless_limit"]


def test_rounding_o_bar_turns_the_sign_over(both: tuple[int, str, Path]) -> None:
    document = localize_planted("fa2+o_bar=bf16")
    assert document["verdict"] == COMPOUNDING_BIAS
    assert document["ranking"][0] == "L1.H2"
    before = head_of(strict(both[1])["twins"]["planted"], "L1.H2")
    after = head_of(document, "L1.H2")
    assert before["delta_defect"]["mean"] < 0 < after["delta_defect"]["mean"]
    assert after["output_err"]["mean_ulp"] > 0 > before["output_err"]["mean_ulp"]


def test_text_of_the_planted_twin(run_cli: Callable[..., Any]) -> None:
    done = run_cli(["demo", "--twin", "planted"])
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    table = next(index for index, line in enumerate(lines) if line.startswith("head "))
    assert lines[table + 1].split()[:2] == ["L1.H2", "BIAS"]
    for wanted in ("VERDICT   compounding bias: 1 of 8 heads, L1.H2", "BF301", "observed: B ", "--recipe",
                   "bf16forensics localize ckpt.pt --batch train.bin", "done      planted: as documented"):  # fmt: skip
        assert wanted in done.stdout
    assert "HEALTHY" not in done.stdout


def test_a_twin_that_comes_out_otherwise_fails_and_is_named(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("healthy.pt", "tokens.bin", "indices.txt"):
        shutil.copy(BUNDLED / name, tmp_path / name)
    shutil.copy(BUNDLED / "healthy.pt", tmp_path / "planted.pt")
    monkeypatch.setattr(_demo_twins, "BUNDLED", tmp_path)
    done = run_cli(["demo", "--twin", "planted"])
    assert done.exit_code == 1
    assert "planted twin: L1.H2 is 'noise at chance level', documented is 'compounding bias'" in flat(done.stdout)
    assert "comes first, documented is L1.H2" in flat(done.stdout)
    assert done.stdout.endswith("done      planted: not as documented\n")


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_missing_file_is_one_line(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_demo_twins, "BUNDLED", tmp_path)
    done = run_cli(["demo"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "planted.pt" in done.stderr


def test_a_file_in_the_place_of_the_directory_is_refused_before_the_run(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    done = run_cli(["demo", "-o", tmp_path / "taken"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "taken" in done.stderr


def test_bundled_files_are_declared_and_small() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "bf16forensics.demo" in declared["packages"]
    patterns = declared["package-data"]["bf16forensics.demo"]
    files = [path for path in BUNDLED.iterdir() if path.suffix != ".py" and path.name != "__pycache__"]
    assert {path.name for path in files} == {"healthy.pt", "planted.pt", "tokens.bin", "indices.txt"}
    for path in files:
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), path.name
        assert path.stat().st_size < 1_000_000


def test_twins_differ_in_the_planted_head_alone() -> None:
    planted, healthy = state("planted.pt"), state("healthy.pt")
    assert list(planted) == list(healthy)
    assert all(values.dtype == torch.bfloat16 for values in planted.values())
    changed = {name: (planted[name] != healthy[name]).nonzero() for name in planted}
    changed = {name: where for name, where in changed.items() if len(where)}
    attention = "transformer.h.1.attn."
    assert set(changed) == {f"{attention}c_attn.weight", f"{attention}c_proj.weight", "lm_head.weight"}
    rows = set(changed[f"{attention}c_attn.weight"][:, 0].tolist())
    inside = range(PLANTED_ROWS.start, PLANTED_ROWS.stop)
    assert rows <= {128 * part + row for part in range(3) for row in inside}
    assert set(changed[f"{attention}c_proj.weight"][:, 1].tolist()) <= set(inside)
    assert set(changed["lm_head.weight"][:, 0].tolist()) == {NEVER}


def test_planted_head_is_what_its_documentation_says() -> None:
    source = PLANTED.run(BUNDLED, threads=1).opened.source
    tied = rows_with_two = one_signed = rows = 0
    of_bullets = []
    for sequence in range(8):
        record = next(record for record in source.records(sequence, lambda loss: None) if record.layer == 1)
        ids = source.batch.ids[sequence]
        bullet = ids < BULLETS
        assert not (ids == NEVER).any()
        k, v, do = record.k[2], record.v[2], record.do[2]
        assert torch.equal(k[bullet].unique(dim=0), k[bullet][:1])
        assert len(v[bullet].unique(dim=0)) == int(bullet.sum())
        of_bullets.append(v[bullet].flatten())
        assert float(v[~bullet].mean()) > -1.2
        one_signed += int((do < 0).all(-1).sum())
        rows += len(ids)
        seen = bullet.cumsum(0)
        scores = (record.q[2] @ k.T) * record.geometry.scale
        for row in (seen == 2).nonzero().flatten().tolist():
            best = scores[row, : row + 1].max()
            tied += int((scores[row, : row + 1] == best).sum() == 2)
            rows_with_two += 1
            residue = scores[row, : row + 1][~bullet[: row + 1]]
            assert float(best - residue.max()) > 7
    values = torch.cat(of_bullets)
    assert float(((values > -4) & (values <= -2)).float().mean()) > 0.99
    assert bool((values < 0).all())
    assert rows_with_two > 0
    assert tied == rows_with_two
    assert one_signed > 0.95 * rows


def test_planting_the_bundled_healthy_twin_gives_the_bundled_planted_one(
    make_demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_demo.GPT()
    model.load_state_dict({name: values.float() for name, values in state("healthy.pt").items()})
    tokens = torch.frombuffer(bytearray((BUNDLED / "tokens.bin").read_bytes()), dtype=torch.int16).long()
    planted = make_demo.plant(model, tokens.view(-1, make_demo.CONTEXT + 1)[:, :-1])
    assert "bullets read" in capsys.readouterr().out
    for name, values in planted.named_parameters():
        # What is measured on the batch in FP32 is stored in BF16: at most one step of 2^-7 where it lies at an edge.
        torch.testing.assert_close(values.detach(), state("planted.pt")[name].float(), rtol=2**-7, atol=0.0)


def test_text_is_the_recorded_batch(make_demo: ModuleType) -> None:
    import numpy as np

    tokens = np.fromfile(BUNDLED / "tokens.bin", dtype="<u2")
    assert len(tokens) == make_demo.LINES * make_demo.SEQUENCES * (make_demo.CONTEXT + 1)
    written = make_demo.write_text(1 << 14, np.random.default_rng(1))
    assert written.max() < NEVER
    assert tokens.max() < NEVER
    # The same grammar: every bullet follows a full stop, and a full stop is followed by a bullet or a determiner.
    for text in (written, tokens):
        before = text[np.flatnonzero(text < BULLETS)[1:] - 1]
        assert (before == make_demo.FULL_STOP).all()


def test_deviations_name_what_differs() -> None:
    from bf16forensics.verdict.findings import HeadVerdict, Judgement
    from bf16forensics.verdict.thresholds import Thresholds

    def judged(verdicts: dict[tuple[int, int], str], first: tuple[int, int]) -> Judgement:
        heads = tuple(
            HeadVerdict(layer=layer, head=head, verdict=verdict, code=None, reason="", harmless_limit=1.0,
                        sequences_needed=None, delta_biased=False, delta_p_adjusted=1.0)
            for (layer, head), verdict in verdicts.items()
        )  # fmt: skip
        ranking = (first, *(key for key in verdicts if key != first))
        return Judgement(verdict="", summary="", heads=heads, ranking=ranking, findings=(), next_commands=(),
                         not_checked=(), thresholds=Thresholds())  # fmt: skip

    good = {(0, 0): NOISE_AT_CHANCE, (1, 2): COMPOUNDING_BIAS}
    assert PLANTED.deviations(judged(good, (1, 2))) == []
    assert len(PLANTED.deviations(judged(good, (0, 0)))) == 1
    assert len(PLANTED.deviations(judged({(0, 0): COMPOUNDING_BIAS, (1, 2): COMPOUNDING_BIAS}, (1, 2)))) == 1
    assert len(HEALTHY.deviations(judged(good, (1, 2)))) == 1
    undecided = {(0, 0): CANNOT_JUDGE, (1, 2): NOISE_AT_CHANCE}
    (text,) = HEALTHY.deviations(judged(undecided, (0, 0)))
    assert "L0.H0 is 'cannot judge'" in text
