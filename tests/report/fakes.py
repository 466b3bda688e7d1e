"""Results of runs that never took place: every number is chosen, so that each rule can be tested at its threshold.

The harmless limit of a fake head is 1.0: sampling noise 40 sqrt(10), 16 sequences a step, 1,000 steps.
"""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from bf16forensics.evidence.results import (
    ClusteredStatistics,
    ErrorStatistics,
    GradientCoupling,
    HeadEvidence,
    Ones,
    OutputError,
    RobustStatistics,
    RowCounts,
    SignedStatistics,
    Spectrum,
    StepRatio,
    Telescope,
)
from bf16forensics.evidence.tie_results import TieClass, TieStatistics
from bf16forensics.investigate.result import LocalizeResult, Timing
from bf16forensics.load.files import FileFacts
from bf16forensics.recipe.presets import FA2
from bf16forensics.report.environment import Environment

#: sqrt(V_g) that makes the harmless limit sqrt(V_g / 16) / sqrt(1000) equal to 1.
SAMPLING_NOISE = 4 * math.sqrt(1000)

ENVIRONMENT = Environment(
    tool_version="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    numpy="2.2.0",
    triton=None,
    platform="Linux x86_64",
    device="cpu",
    threads=2,
    host="bench",
    date="2026-01-02T03:04:05+00:00",
)

COMMAND = (
    "bf16forensics",
    "localize",
    "run 7/ckpt.pt",
    "--batch",
    "train.bin",
    "--indices",
    "indices_rank_0.txt",
    "--lines",
    "0:2",
    "--json",
    "-o",
    "case",
)


def check_golden(path: Path, text: str) -> None:
    """Compares text with a file, byte for byte; BF16FORENSICS_REGENERATE_GOLDEN=1 writes the file first."""
    if os.environ.get("BF16FORENSICS_REGENERATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))
    assert path.is_file(), f"{path.name} is missing; write it with BF16FORENSICS_REGENERATE_GOLDEN=1"
    same = path.read_bytes().decode("utf-8") == text
    assert same, f"{path.name} differs; see the difference with BF16FORENSICS_REGENERATE_GOLDEN=1 and git diff"


def signed(*, p: float = 0.5, t: float = 0.7, sequences: int = 32, **fields: Any) -> SignedStatistics:
    """A signed quantity; `p` (all three), `t` and `sequences` are the clustered ones."""
    values: dict[str, Any] = {
        "sum": -1.25,
        "mean": -0.00122,
        "standard_error": 0.0018,
        "z": -0.68,
        "positive": 400,
        "negative": 520,
        "zero": 104,
        "running_tokens": (-0.5, -1.25),
        "running_steps": (-1.25,),
        "clustered": ClusteredStatistics(
            sequences=sequences, mean=-0.039, standard_error=0.056, t=t, p=p, p_flip=p, p_adjusted=p
        ),
        "robust": RobustStatistics(n_effective=210.0, largest_share=0.031, sign_without_top_1_percent=-1),
    }
    return SignedStatistics(**{**values, **fields})


def errors(**fields: float) -> ErrorStatistics:
    """Statistics of one part of the error; by default noise well below the limit of 1."""
    values = {
        "rho": 0.02,
        "bias": 0.1,
        "bias_lower": -0.2,
        "bias_upper": 0.4,
        "minimum_detectable": 0.3,
        "p": 0.2,
        "p_adjusted": 0.9,
        "n_effective": 24.0,
        "gain": -0.01,
    }
    return ErrorStatistics(**{**values, **fields})


def coupling(**fields: Any) -> GradientCoupling:
    """A gradient of W_Q with its error."""
    values: dict[str, Any] = {
        "norm": 52.5,
        "error_full_relative": 0.021,
        "error_defect_relative": 0.024,
        "error_total_relative": 0.025,
        "sequences": 32,
        "sampling_noise": SAMPLING_NOISE,
        "signal": 38.0,
        "signal_p": 0.002,
        "defect": errors(),
        "total": errors(),
        "telescope": Telescope(
            share_scores=0.01,
            share_defect=0.95,
            share_cast_ds=0.03,
            share_cast_dq=0.01,
            share_rest=0.0,
            scores_relative=0.001,
            defect_relative=0.024,
            cast_ds_relative=0.0024,
            cast_dq_relative=0.0016,
        ),
        "functional_relative": 0.0075,
        "flat_share": 0.47,
        "flat_share_gradient": 0.14,
        "coherence": 0.01,
        "coherence_direction": 0.12,
        "coherence_steps": 0.05,
        "steps": (
            StepRatio(step=101, sequences=16, norm=50.0, error_defect_relative=0.026, error_total_relative=0.027),
            StepRatio(step=102, sequences=16, norm=55.0, error_defect_relative=0.022, error_total_relative=0.023),
        ),
    }
    return GradientCoupling(**{**values, **fields})


def counts(**fields: Any) -> RowCounts:
    """Rows of a head without anything special."""
    values: dict[str, Any] = {
        "rows": 1024,
        "rows_repeated_max": 0,
        "rows_repeated_max_unlabelled": 0,
        "rows_near_max": 0,
        "rows_fully_masked": 0,
        "rows_padding": 0,
        "rows_swamped": 12,
        "swamped_power_share": 0.02,
        "repeated_sum_share": 0.0,
        "sink_share": 0.3,
        "most_ones": 1,
    }
    return RowCounts(**{**values, **fields})


def tie_class(**fields: Any) -> TieClass:
    """Rows with two ones whose halves go away from zero."""
    values: dict[str, Any] = {
        "ones_min": 2,
        "ones_max": 2,
        "rows": 298,
        "groups": 41,
        "elements": 19072,
        "tie_share": 0.4875,
        "bits_dropped": (0.0, 0.75, 0.1875, 0.0625),
        "same_sign_share": 0.9688,
        "residue_ulp_mean": 0.03,
        "residue_ulp_size": 0.04,
        "error_ulp_mean": 0.198,
        "law_ulp_mean": 0.201,
        "standard_error": 0.006,
        "difference_standard_error": 0.004,
        "z_zero": 33.0,
        "z": -0.75,
    }
    return TieClass(**{**values, **fields})


def ties(*classes: TieClass, **fields: Any) -> TieStatistics:
    """Statistics of the rounding of O."""
    values: dict[str, Any] = {"point": "o", "format": "bf16", "classes": classes, "rows_beyond": 0}
    return TieStatistics(**{**values, **fields})


def head(layer: int = 0, number: int = 0, **fields: Any) -> HeadEvidence:
    """One head at noise level."""
    values: dict[str, Any] = {
        "layer": layer,
        "head": number,
        "kv_head": number,
        "delta_err": signed(),
        "delta_defect": signed(),
        "ds_row_sum": signed(),
        "output_err": OutputError(
            mean_ulp=0.0004,
            max_abs=0.0078125,
            max_ulp=0.5,
            sequence=3,
            token=17,
            feature=20,
            sign_correlation=0.11,
            sign_correlation_feature=5,
        ),
        "ones": Ones(fp32_exact=1024, rounded=1024, shared_maximum=1024),
        "counts": counts(),
        "ties": None,
        "pairs": 16896,
        "score_abs_max": 11.5,
        "spectrum": Spectrum(
            w_q_spectral_norm=2.75,
            w_k_spectral_norm=2.5,
            w_q_stable_rank=9.0,
            w_k_stable_rank=8.0,
            qk_spectral_norm=0.8,
            w_q_all_zero=False,
        ),
        "dw_q": coupling(),
        "nonfinite": (),
    }
    return HeadEvidence(**{**values, **fields})


def result(*heads: HeadEvidence, **fields: Any) -> LocalizeResult:
    """A run over a nanoGPT checkpoint with these heads."""
    values: dict[str, Any] = {
        "recipe": FA2,
        "reference": "fp64",
        "activations": "fp32",
        "inputs": (
            FileFacts(role="checkpoint", path="run 7/ckpt.pt", size_bytes=42_500_000, sha256="0123456789abcdef" * 4),
            FileFacts(role="tokens", path="train.bin", size_bytes=2_000_000, sha256="fedcba9876543210" * 4),
            FileFacts(role="indices", path="indices_rank_0.txt", size_bytes=812, sha256="00ff" * 16),
        ),
        "kind": "nanogpt",
        "shape": "2 layers, 4 heads, head size 64, width 256",
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_size": 64,
        "scale": 0.125,
        "window": None,
        "softcap": None,
        "causal": True,
        "layer_windows": (fields.get("window"),) * 2,
        "no_gradient": None,
        "no_output_head": False,
        "sequences": 32,
        "sequences_planned": 32,
        "tokens": 32,
        "steps": (101, 102),
        "step_sequences": 16,
        "loss": 3.21875,
        "heads": heads,
        "unused_tensors": (),
        "notes": ("dropout 0.1 forced to 0",),
        "interrupted": False,
        "timing": Timing(load_s=0.5, capture_s=1.2, evidence_s=2.0, analysis_s=3.1, peak_rss_bytes=812_000_000),
    }
    return LocalizeResult(**{**values, **fields})


def biased(**fields: Any) -> GradientCoupling:
    """A gradient whose delta error compounds: lower bound 2.1 times the limit."""
    part = errors(rho=0.4, bias=3.0, bias_lower=2.1, bias_upper=3.6, p=0.0002, p_adjusted=0.0005)
    return coupling(**{"defect": part, "total": replace(part, bias=3.1), "error_defect_relative": 0.0571, **fields})


def mixed() -> LocalizeResult:
    """One head of every verdict, triggers, a damaged head and unused tensors: the run of the golden reports."""
    undecided = errors(bias_upper=1.9, minimum_detectable=1.5)
    return result(
        head(0, 0),
        head(0, 1, dw_q=coupling(defect=undecided, signal_p=0.4, error_defect_relative=0.81)),
        head(0, 2, delta_defect=signed(p=0.0001, t=-6.5)),
        head(0, 3, nonfinite=("k[0, 3, 7, 1]",), dw_q=None),
        head(
            1,
            0,
            dw_q=biased(),
            delta_defect=signed(p=0.00001, t=9.25, mean=0.0153, positive=820, negative=150, zero=54),
            counts=counts(rows_repeated_max=310, rows_near_max=305, most_ones=6, repeated_sum_share=0.93),
            ties=ties(tie_class(), tie_class(ones_min=5, ones_max=8, rows=12, groups=1, z=math.nan)),
        ),
        head(1, 1, dw_q=coupling(defect=errors(rho=1.5), total=errors(rho=1.625))),
        head(1, 2, dw_q=coupling(defect=errors(n_effective=4.8))),
        head(
            1,
            3,
            counts=counts(rows_repeated_max=8, rows_repeated_max_unlabelled=2, rows_near_max=4, rows_padding=3),
            ties=ties(tie_class(rows=8, groups=8, error_ulp_mean=-0.02, law_ulp_mean=0.0, standard_error=0.03)),
        ),
        unused_tensors=("transformer.h.0.attn.q_norm.weight",),
    )
