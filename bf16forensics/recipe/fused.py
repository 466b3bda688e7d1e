"""The presets of fused attention kernels on GPUs: FlashAttention-2 and what is derived from it."""

from dataclasses import replace

from bf16forensics.recipe.model import Recipe, TileRule

FA2 = Recipe(
    name="fa2",
    version=1,
    source="flash-attention@0251105 csrc/flash_attn/src: flash_fwd_kernel.h, softmax.h, utils.h, "
    "flash_fwd_launch_template.h, flash_bwd_preprocess_kernel.h, flash_bwd_kernel.h (PyTorch's unfused multiply)",
    summary="FlashAttention-2 CUDA, BF16 in and out: FP32 scores and row sum, BF16 P-bar, one rounding of O",
    scale_placement="exponent",
    scores="fp32",
    shifted="fp32",
    exponential="exp2",
    p_bar="bf16",
    p_bar_cast="before",
    row_sum_input="fp32",
    row_sum="fp32",
    o_bar="fp32",
    o_bar_at="end",
    o="bf16",
    division="reciprocal",
    lse="fp32",
    # Forward launch template for sm80 and sm90 without dropout; the library stops at 256, the last rule is ours.
    tiles=(
        TileRule(head_size_max=64, tile_q=128, tile_k=128),
        TileRule(head_size_max=128, tile_q=128, tile_k=64),
        TileRule(head_size_max=160, tile_q=128, tile_k=32),
        TileRule(head_size_max=256, tile_q=128, tile_k=64),
        TileRule(head_size_max=None, tile_q=64, tile_k=64),
    ),
    tile_order="descending",
    p_source="lse",
    delta_source="o",
    delta_products="fp32",
    delta="fp32",
    dp="fp32",
    p_backward="bf16",
    ds="bf16",
    dq="bf16",
    dkv="bf16",
    gradients_at="end",
    arithmetic="fp32",
)

FA3 = replace(
    FA2,
    name="fa3",
    version=1,
    source="flash-attention@0251105 hopper: mainloop_fwd_sm90_tma_gmma_ws.hpp, softmax.h, tile_size.h, "
    "flash_bwd_preprocess_kernel.h, flash_bwd_launch_template.h",
    summary="FlashAttention-3 BF16 (Hopper): the rounding points of fa2 with tiles of its own",
    # tile_size_fwd_sm90 for 2-byte elements, values as wide as keys; the library stops at 256, the last rule is ours.
    tiles=(
        TileRule(head_size_max=64, tile_q=192, tile_k=128, causal=True),
        TileRule(head_size_max=64, tile_q=192, tile_k=192, causal=False),
        TileRule(head_size_max=96, tile_q=192, tile_k=144),
        TileRule(head_size_max=128, tile_q=128, tile_k=128, causal=True),
        TileRule(head_size_max=128, tile_q=128, tile_k=176, causal=False),
        TileRule(head_size_max=192, tile_q=128, tile_k=112),
        TileRule(head_size_max=256, tile_q=128, tile_k=80),
        TileRule(head_size_max=None, tile_q=64, tile_k=64),
    ),
)

FA3_FP8 = replace(
    FA3,
    name="fa3-fp8",
    version=1,
    source="flash-attention@0251105 hopper: flash_fwd_kernel_sm90.h, softmax.h, tile_size.h, without two-level "
    "accumulation (open pull requests 2250 and 2323)",
    summary="FlashAttention-3 FP8 (Hopper), forward only: E4M3 q, k, v and P-bar, P-bar times 2^8, O in BF16",
    operands="e4m3",
    p_scale="256",
    p_bar="e4m3",
    # tile_size_fwd_sm90 for 1-byte elements, row-major V.
    tiles=(
        TileRule(head_size_max=64, tile_q=192, tile_k=160),
        TileRule(head_size_max=96, tile_q=192, tile_k=128),
        TileRule(head_size_max=128, tile_q=128, tile_k=224),
        TileRule(head_size_max=192, tile_q=128, tile_k=160),
        TileRule(head_size_max=256, tile_q=128, tile_k=128),
        TileRule(head_size_max=None, tile_q=64, tile_k=64),
    ),
    passes="forward",
    # No FP8 backward pass exists; nothing of one is claimed to round.
    p_backward="fp32",
    ds="fp32",
    dq="fp32",
    dkv="fp32",
)

FA4 = replace(
    FA2,
    name="fa4",
    version=1,
    source="flash-attention@0251105 flash_attn/cute: softmax.py, utils.py, flash_fwd_sm100.py, flash_bwd_sm100.py, "
    "interface.py, for sm100; not run on hardware",
    summary="FlashAttention-4 BF16 (Blackwell): as fa2, but the anchor lags the maximum by up to 2^8 and some keys "
    "take a cubic exponential",
    exponential="exp2-cubic",
    rescale_threshold="8",
    tiles=(TileRule(head_size_max=None, tile_q=128, tile_k=128),),
)

FLEX = replace(
    FA2,
    name="flex",
    version=1,
    source="pytorch v2.13.0 torch/_inductor: kernel/flex/templates/flex_attention.py.jinja, flex_backwards.py.jinja, "
    "template_heuristics/triton.py (tiles of an H100), kernel/flex/flex_attention.py",
    summary="PyTorch flex_attention: as fa2 with the scale applied to FP32 scores and partly masked blocks first",
    scale_placement="scores",
    division="divide",
    # The table names head sizes 64, 128, 192 and 256; every other one has the default of 64 x 64 (64 x 32 beyond 256).
    tiles=(
        TileRule(head_size_max=63, tile_q=64, tile_k=64),
        TileRule(head_size_max=64, tile_q=128, tile_k=128),
        TileRule(head_size_max=127, tile_q=64, tile_k=64),
        TileRule(head_size_max=128, tile_q=128, tile_k=64),
        TileRule(head_size_max=191, tile_q=64, tile_k=64),
        TileRule(head_size_max=192, tile_q=128, tile_k=128),
        TileRule(head_size_max=255, tile_q=64, tile_k=64),
        TileRule(head_size_max=None, tile_q=64, tile_k=32),
    ),
    tile_order="masked-first",
)
