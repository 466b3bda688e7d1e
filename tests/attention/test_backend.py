"""The choice of what computes the dual pass: every reason in one line, and nothing in silence."""

import sys
from dataclasses import replace

import pytest
import torch

from bf16forensics.attention import backend as backend_module
from bf16forensics.attention.backend import BACKENDS, REFERENCE, ChosenBackend, choose_backend, run_dual_pass
from bf16forensics.attention.dual import dual_pass
from bf16forensics.attention.fused_inputs import why_not_geometry
from bf16forensics.attention.fused_recipe import fused_recipe, why_not_fused
from bf16forensics.attention.kernel_rounding import INTERPRET_VARIABLE
from bf16forensics.errors import InputError, RecipeError
from bf16forensics.recipe.derive import flip, resolve, rounding_points
from bf16forensics.recipe.presets import FA2, PRESETS

FUSED = ("fa2", "fa3", "paper", "sdpa-math")


@pytest.fixture
def machine(monkeypatch):
    """A made-up machine: with or without Triton, a GPU of some capability, the interpreter."""

    def pretend(*, triton=True, capability=(9, 0), interpreter=False, cuda="13.0"):
        monkeypatch.setitem(sys.modules, "triton", torch if triton else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setenv(INTERPRET_VARIABLE, "1" if interpreter else "0")

    return pretend


#: What stands in the way on a machine; None where nothing does.
MACHINES = [
    ({}, None),
    ({"triton": False}, "Triton is not installed; install bf16forensics[gpu]"),
    ({"capability": None}, "no CUDA device"),
    ({"cuda": None}, "the GPU is not NVIDIA's"),
    ({"capability": (7, 5)}, "GPU has compute capability 7.5, and BF16 products need 8.0"),
    ({"capability": (8, 0)}, None),
]


@pytest.mark.parametrize(("given", "missing"), MACHINES, ids=str)
def test_auto_takes_triton_where_it_can_and_says_why_not(machine, given, missing):
    machine(**given)
    found = choose_backend("auto", FA2, "fp32")
    if missing is None:
        assert (found.name, found.device, found.hp_products, found.lp_products) == (
            "triton",
            "cuda (GPU)",
            "split",
            "shared",
        )
        assert found.is_fused
        assert found.on_gpu
        assert found.may_use_reference
    else:
        assert found == ChosenBackend(name="reference", device="cpu", why=missing)


@pytest.mark.parametrize(("given", "missing"), MACHINES, ids=str)
def test_triton_that_cannot_run_is_an_error(machine, given, missing):
    machine(**given)
    if missing is None:
        found = choose_backend("triton", FA2, "fp32", hp_products="ieee", lp_products="own")
        assert (found.why, found.may_use_reference) == ("asked for", False)
        assert (found.hp_products, found.lp_products) == ("ieee", "own")
        return
    with pytest.raises(InputError) as caught:
        choose_backend("triton", FA2, "fp32")
    # Every one ends with what to do.
    remedy = "" if given == {"triton": False} else "; use --backend auto or reference"
    assert str(caught.value) == f"--backend triton: {missing}{remedy}"


@pytest.mark.parametrize(
    ("recipe", "reference", "words"),
    [
        ("fa4", "fp32", "exponential=exp2-cubic is not in the fused pass"),
        ("fa2+rescale_threshold=8", "fp32", "rescale_threshold=8"),
        ("fa2+p_bar=e4m3", "fp32", "p_bar=e4m3 is not in the fused pass, which has bf16 and fp32"),
        ("fa2+ds=fp16", "fp32", "ds=fp16"),
        ("eager", "fp32", "dp=bf16"),
        ("fa2", "fp64", "the fused pass has no --reference fp64; it takes fp32"),
    ],
)
def test_what_the_kernels_lack_is_named(machine, recipe, reference, words):
    machine()
    found = choose_backend("auto", resolve(recipe), reference)
    assert found.name == "reference"
    assert words in found.why
    with pytest.raises(InputError, match="^--backend triton: [^\n]+$") as caught:
        choose_backend("triton", resolve(recipe), reference)
    assert words in str(caught.value)


def test_the_interpreter_is_for_who_asks_for_it(machine):
    machine(capability=None, interpreter=True)
    found = choose_backend("triton", FA2, "fp32")
    assert (found.name, found.device, found.on_gpu) == ("triton", "cpu (interpreter)", False)
    auto = choose_backend("auto", FA2, "fp32")
    assert auto.name == "reference"
    assert INTERPRET_VARIABLE in auto.why
    machine(triton=False, capability=None, interpreter=True)
    with pytest.raises(InputError, match=r"install bf16forensics\[gpu\]"):
        choose_backend("triton", FA2, "fp32")


def test_the_reference_asks_the_machine_nothing(machine, monkeypatch):
    machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    for reference in ("fp32", "fp64"):
        found = choose_backend("reference", resolve("fa4"), reference)
        assert found == ChosenBackend(name="reference", device="cpu", why="asked for")


@pytest.mark.parametrize("wanted", ["auto", "reference"])
@pytest.mark.parametrize(("option", "value"), [("hp_products", "ieee"), ("lp_products", "shared")])
def test_a_choice_of_the_fused_pass_is_not_dropped(machine, wanted, option, value):
    machine(capability=None)
    with pytest.raises(InputError, match=f"^--{option.replace('_', '-')} {value} is a choice of the fused pass, and"):
        choose_backend(wanted, FA2, "fp32", **{option: value})


@pytest.mark.parametrize(
    "given", [{"wanted": "cuda"}, {"wanted": "auto", "hp_products": "tf32"}, {"wanted": "auto", "lp_products": ""}]
)
def test_unknown_names_are_refused(given):
    with pytest.raises(InputError, match="^unknown --[a-z-]+ '[^\n]*'; choose one of [^\n]+$"):
        choose_backend(recipe=FA2, reference="fp32", **given)


def test_a_broken_driver_warns_nobody(machine, monkeypatch):
    machine(capability=None)

    def warn() -> bool:
        import warnings

        warnings.warn("driver too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert choose_backend("auto", FA2, "fp32").why == "no CUDA device"


# -- recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED)
def test_presets_and_all_their_single_flips_have_a_fused_form(name):
    recipe = resolve(name)
    for derived in (recipe, *(flip(recipe, point) for point in rounding_points(recipe))):
        assert why_not_fused(derived) is None, derived.name
        assert fused_recipe(derived, 64, 1000, True).tile_k >= 0


def test_other_presets_have_none_and_say_so_in_one_line():
    for preset in PRESETS:
        reason = why_not_fused(preset)
        assert (reason is None) == (preset.name in FUSED)
        if reason is not None:
            assert "\n" not in reason
            with pytest.raises(RecipeError, match=f"^recipe {preset.name}: "):
                fused_recipe(preset, 64, 1000, True)


@pytest.mark.parametrize(
    "points",
    ["p_bar_cast=after", "p_bar_cast=after,p_bar=fp32,o_bar=bf16", "gradients_at=buffer", "ds_scale=ds",
     "row_sum_order=avx2", "arithmetic=exact", "operands=e4m3", "p_scale=256", "tile_order=masked-first", "dp=bf16"],
)  # fmt: skip
def test_neighbours_of_the_taken_values_are_refused(points):
    reason = why_not_fused(resolve(f"fa2+{points}"))
    assert reason is not None
    assert points.split(",")[0] in reason


@pytest.mark.parametrize(
    "points",
    ["p_bar_cast=after,p_bar=fp32", "gradients_at=buffer,dq=fp32", "gradients_at=tile", "p_backward=fp16", "dkv=fp16",
     "passes=forward", "query_tiles=by-length", "delta_source=dp", "p_source=saved", "scale_placement=operands"],
)  # fmt: skip
def test_neighbours_that_the_dual_pass_does_not_meet_are_taken(points):
    assert why_not_fused(resolve(f"fa2+{points}")) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fa2", {"scale_in": "exponent", "exp2": True, "tile_k": 128, "descending": True, "dq_by_tile": False}),
        ("fa2+scores=bf16", {"scale_in": "scores", "scores": True}),
        ("fa2+o_bar_at=tile", {"o_bar": False, "o_bar_by_tile": False}),
        ("fa2+p_bar_cast=after,p_bar=fp32", {"tile_k": 0, "descending": False}),
        ("fa2+gradients_at=tile", {"dq_by_tile": True}),
        ("fa2+gradients_at=tile,dq=fp32", {"dq_by_tile": False}),
        ("paper", {"scale_in": "scores", "exp2": False, "tile_k": 512, "o_bar_by_tile": True, "descending": False}),
        ("paper+o_bar=fp32", {"o_bar": False, "o_bar_by_tile": False}),
        ("sdpa-math", {"scale_in": "operands", "tile_k": 0, "delta_from_dp": True, "p_saved": True}),
        ("fa3", {"tile_k": 128}),
    ],
)
def test_the_constants_of_a_recipe(name, expected):
    found = fused_recipe(resolve(name), 64, 1000, True)
    assert {field: getattr(found, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("head_size", "has_edge", "tile_k"), [(64, True, 128), (64, False, 192), (96, True, 144), (128, False, 176)]
)
def test_tiles_follow_the_call(head_size, has_edge, tile_k):
    assert fused_recipe(resolve("fa3"), head_size, 1000, has_edge).tile_k == tile_k


# -- calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"softcap": 50.0}, "softcap 50"), ({"bias": torch.zeros(1, 37, 37)}, "bias")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_that_the_fused_pass_lacks(monkeypatch, oracle, record_of, changes, word):
    plain = record_of(oracle.draw(14))
    record = replace(plain, layer=3, geometry=replace(plain.geometry, **changes))
    reason = why_not_geometry(record)
    assert reason is not None
    assert word in reason
    assert why_not_geometry(plain) is None
    asked = ChosenBackend(name="triton", device="cuda (GPU)", why="asked for", may_use_reference=False)
    with pytest.raises(InputError, match=f"^--backend triton: layer 3: .*{word}.*; use --backend auto or reference$"):
        run_dual_pass(record, FA2, "fp32", asked)
    ran = run_dual_pass(record, FA2, "fp32", replace(asked, may_use_reference=True))
    assert ran.why_reference == reason
    assert torch.equal(ran.dual.o_lp, dual_pass(record, FA2, "fp32").o_lp)


def test_heads_that_are_too_wide_are_named(oracle, record_of):
    plain = record_of(oracle.draw(14))
    for size, fits in ((256, True), (257, False)):
        wide = replace(plain, v=torch.zeros(*plain.v.shape[:2], size))
        assert (why_not_geometry(wide) is None) == fits


def test_the_reference_needs_no_kernels(monkeypatch, oracle, record_of):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "bf16forensics.attention.fused", None)
    record = record_of(oracle.draw(14))
    ran = run_dual_pass(record, FA2, "fp64", REFERENCE)
    assert ran.why_reference is None
    assert torch.equal(ran.dual.o_err, dual_pass(record, FA2, "fp64").o_err)


def test_the_names_are_those_of_the_command():
    from bf16forensics.commands._options import Backend, HpProducts, LpProducts

    assert tuple(Backend) == BACKENDS
    assert tuple(HpProducts) == backend_module.HP_PRODUCTS
    assert tuple(LpProducts) == backend_module.LP_PRODUCTS


def test_choosing_loads_nothing_heavy(run_python):
    code = (
        "import sys, bf16forensics.attention.backend as b; from bf16forensics.recipe.presets import FA2; "
        "b.choose_backend('reference', FA2, 'fp32'); "
        "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert run_python(["-c", code]).exit_code == 0


@pytest.mark.gpu
def test_the_reference_gives_back_where_the_record_lies(oracle, record_of):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    record = record_of(oracle.draw(14))
    here, there = (
        run_dual_pass(some, FA2, "fp32", REFERENCE).dual for some in (record, record.to(torch.device("cuda")))
    )
    assert there.o_err.is_cuda
    assert torch.equal(there.o_err.cpu(), here.o_err)
    assert torch.equal(there.dq.lp.cpu(), here.dq.lp)
