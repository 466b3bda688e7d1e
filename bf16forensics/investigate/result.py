"""What one localize run produced, before anything is judged or printed. No tensors."""

from dataclasses import dataclass

from bf16forensics.evidence.observe_results import Observation
from bf16forensics.evidence.results import HeadEvidence
from bf16forensics.investigate.inputs import InputOptions
from bf16forensics.load.files import FileFacts
from bf16forensics.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Wall times of one run, seconds, and its peak memory. Volatile: differs between runs."""

    load_s: float
    #: Forward and backward of the model, layer by layer (0 for records).
    capture_s: float
    #: Dual pass and evidence.
    evidence_s: float
    #: Wall time of capture and evidence together (they run side by side on several threads).
    analysis_s: float
    #: Peak resident memory of the process.
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendUsed:
    """What computed the dual pass."""

    #: "reference" or "triton".
    name: str = "reference"
    #: "cpu", "cuda (NVIDIA H200)" or "cpu (interpreter)".
    device: str = "cpu"
    #: Why it was this one, in one clause.
    why: str = "asked for"
    #: Choices of the fused pass ("split" or "ieee"; "shared" or "own"); None for the reference.
    hp_products: str | None = None
    lp_products: str | None = None
    #: Layers whose calls the fused pass does not have, so that the reference computed them.
    reference_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizeResult:
    """The evidence of every head, with everything needed to read it."""

    recipe: Recipe
    #: "fp32" or "fp64".
    reference: str
    #: "amp-bf16" or "fp32" for a captured model; None for records.
    activations: str | None
    inputs: tuple[FileFacts, ...]
    #: "nanogpt", "hf" or "record".
    kind: str
    #: Geometry in words for the header, e.g. "6 layers, 6 heads, head size 64, width 384".
    shape: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    #: Softmax scale, window (None: none), soft-cap (None: none), causal.
    scale: float
    window: int | None
    softcap: float | None
    causal: bool
    #: Window of each layer, None for full attention; `window` is None where they differ.
    layer_windows: tuple[int | None, ...]
    #: Sequences analysed, sequences asked for (more after an interruption or an early decision), tokens a sequence.
    sequences: int
    sequences_planned: int
    tokens: int
    #: Recorded steps analysed, in order; None for an unknown step.
    steps: tuple[int | None, ...]
    #: Sequences of one whole recorded step (the optimiser's batch as far as it is known).
    step_sequences: int
    #: Mean loss over the sequences; nan for records.
    loss: float
    #: Why no head can have a dO or a delta, in words ("no output head: ..."); None where nothing stands in the way.
    no_gradient: str | None
    #: True when the checkpoint itself lacks what a gradient needs: an input error beside the forward evidence.
    no_output_head: bool
    heads: tuple[HeadEvidence, ...]
    #: Attention tensors of the input that the analysis did not use.
    unused_tensors: tuple[str, ...]
    #: Things done to the input that a reader must know ("dropout 0.1 forced to 0").
    notes: tuple[str, ...]
    #: True when the run was stopped by the user before all sequences were done.
    interrupted: bool
    timing: Timing
    #: The observation of the paper's appendix D; None unless asked for.
    observation: Observation | None = None
    #: How the input was named, so that it can be captured again; None where that is not known.
    options: InputOptions | None = None
    #: What computed the dual pass.
    backend: BackendUsed = BackendUsed()
