"""Which implementation of the dual pass computes: the reference, or the fused kernels. Chosen once, said in the report.

Nothing falls back in silence: "triton" that cannot run is an error, and "auto" says why it took what it took. Importing
this loads neither torch nor Triton.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bf16forensics.errors import InputError
from bf16forensics.recipe.model import Recipe

if TYPE_CHECKING:
    from bf16forensics.attention.result import DualPass
    from bf16forensics.capture.record import AttentionRecord

BACKENDS = ("auto", "reference", "triton")
#: How the high-precision product with V is taken: P-bar in two BF16 terms, or IEEE FP32. And whether the recipe's own
#: product is the first of these terms, or has an accumulator chain of its own.
HP_PRODUCTS = ("split", "ieee")
LP_PRODUCTS = ("shared", "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBackend:
    """What computes the dual pass, and why."""

    #: "reference" or "triton".
    name: str
    #: "cpu", "cuda" with the name of the GPU, or "cpu (interpreter)".
    device: str
    #: One clause for the report.
    why: str
    #: Whether calls that the fused pass does not have go through the reference ("auto"), or are an error ("triton").
    may_use_reference: bool = True
    #: One of `HP_PRODUCTS` and of `LP_PRODUCTS`; None for the reference.
    hp_products: str | None = None
    lp_products: str | None = None

    @property
    def is_fused(self) -> bool:
        """Whether the fused kernels compute."""
        return self.name == "triton"

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.device.startswith("cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanPass:
    """A dual pass, and what ran it."""

    dual: "DualPass"
    #: Why the reference took the call in the place of the fused pass; None where the chosen backend ran.
    why_reference: str | None = None


#: The reference where nothing was to be chosen, whatever the machine has.
REFERENCE = ChosenBackend(name="reference", device="cpu", why="the only choice here")


def choose_backend(
    wanted: str,
    recipe: Recipe,
    reference: str,
    *,
    hp_products: str | None = None,
    lp_products: str | None = None,
) -> ChosenBackend:
    """Chooses what computes the dual pass.

    Args:
        wanted: one of `BACKENDS`. "auto" takes Triton where it is installed, a GPU is there, the recipe has a fused
            form and the reference is fp32; else the reference.
        recipe: of the run.
        reference: "fp32" or "fp64"; the fused pass is of FP32 quality.
        hp_products: one of `HP_PRODUCTS`; None for "split". A choice of the fused pass alone.
        lp_products: one of `LP_PRODUCTS`; None for "shared". A choice of the fused pass alone.

    Raises:
        InputError: an unknown name; "triton" that cannot run here, with this recipe or reference; a choice of the
            fused pass for a run of the reference.
    """
    for option, value, known in (
        ("backend", wanted, BACKENDS),
        ("hp-products", hp_products, (None, *HP_PRODUCTS)),
        ("lp-products", lp_products, (None, *LP_PRODUCTS)),
    ):
        if value not in known:
            raise InputError(f"unknown --{option} {value!r}; choose one of {', '.join(filter(None, known))}")
    missing = "asked for" if wanted == "reference" else _why_not_triton(wanted, recipe, reference)
    if missing is None:
        return _fused(wanted, hp_products or "split", lp_products or "shared")
    if wanted == "triton":
        remedy = "" if ";" in missing else "; use --backend auto or reference"
        raise InputError(f"--backend triton: {missing}{remedy}")
    for option, value in (("hp-products", hp_products), ("lp-products", lp_products)):
        if value is not None:
            raise InputError(f"--{option} {value} is a choice of the fused pass, and the reference runs: {missing}")
    return ChosenBackend(name="reference", device="cpu", why=missing)


def run_dual_pass(record: "AttentionRecord", recipe: Recipe, reference: str, backend: ChosenBackend) -> RanPass:
    """Runs a record through a recipe and through high precision by the chosen backend.

    Args:
        record: one attention call of one sequence, on any device.
        recipe: rounding points.
        reference: "fp32" or "fp64".
        backend: from `choose_backend` for the same recipe and reference.

    Returns:
        The pass, on the record's device. The reference computes on the CPU.

    Raises:
        InputError: the fused pass was asked for and does not have the call's geometry.
    """
    import torch

    from bf16forensics.attention.dual import dual_pass
    from bf16forensics.attention.result import on_device

    why = None
    if backend.is_fused:
        from bf16forensics.attention.fused import fused_dual_pass
        from bf16forensics.attention.fused_inputs import why_not_geometry

        why = why_not_geometry(record)
        if why is None:
            return RanPass(
                dual=fused_dual_pass(
                    record,
                    recipe,
                    hp_products=backend.hp_products or "split",
                    lp_products=backend.lp_products or "shared",
                )
            )
        if not backend.may_use_reference:
            raise InputError(f"--backend triton: layer {record.layer}: {why}; use --backend auto or reference")
    on_cpu = record.to(torch.device("cpu")) if record.q.is_cuda else record
    found = dual_pass(on_cpu, recipe, reference)
    return RanPass(dual=on_device(found, record.q.device) if record.q.is_cuda else found, why_reference=why)


def _fused(wanted: str, hp_products: str, lp_products: str) -> ChosenBackend:
    import torch

    from bf16forensics.attention.kernel_rounding import is_interpreting

    device = "cpu (interpreter)" if is_interpreting() else f"cuda ({torch.cuda.get_device_name()})"
    return ChosenBackend(
        name="triton",
        device=device,
        why="asked for" if wanted == "triton" else "Triton, a GPU and a recipe that the fused pass has",
        may_use_reference=wanted == "auto",
        hp_products=hp_products,
        lp_products=lp_products,
    )


def _why_not_triton(wanted: str, recipe: Recipe, reference: str) -> str | None:
    """One clause on what stands in the way of the fused pass, with what to do about it; None for nothing."""
    from bf16forensics.attention.fused_recipe import why_not_fused
    from bf16forensics.attention.kernel_rounding import INTERPRET_VARIABLE, is_interpreting
    from bf16forensics.capture.device import why_no_gpu

    def triton() -> str | None:
        return None if _has_triton() else "Triton is not installed; install bf16forensics[gpu]"

    def machine() -> str | None:
        if not is_interpreting():
            return why_no_gpu()
        return None if wanted == "triton" else f"{INTERPRET_VARIABLE} is set, and interpreting kernels is for tests"

    def precision() -> str | None:
        return None if reference == "fp32" else f"the fused pass has no --reference {reference}; it takes fp32"

    # Where nothing was asked for, the cheap questions come first: loading Triton takes a second.
    place = (triton, machine) if wanted == "triton" else (machine, triton)
    reasons = (*place, lambda: why_not_fused(recipe), precision)
    return next((found for reason in reasons if (found := reason()) is not None), None)


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
