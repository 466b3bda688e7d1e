"""Chains of one stated mma.sync instruction, through inline PTX: Triton chooses its own shape.

Needs torch with NVRTC (`torch.cuda._compile_kernel`, torch 2.9 or newer) and a GPU from compute capability 8.0.
"""

import torch

#: Instruction by the name used for it: PTX name without operand types, elements of the dot product it takes.
SHAPES = {"m16n8k8": 8, "m16n8k16": 16}
_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

# Eight problems a warp: problem j in row j of A, in column j of B and on the diagonal of C; the rest is zero. Which
# thread holds which element: PTX ISA, "Matrix Fragments for mma.m16n8k8" and "mma.m16n8k16".
_SOURCE = r"""
__device__ unsigned two(const unsigned short* x, long at, bool real) {
    return real ? (unsigned)x[at] | (unsigned)x[at + 1] << 16 : 0u;
}

extern "C" __global__ void chain(
    const unsigned short* a, const unsigned short* b, const float* c, float* d, int n, int k
) {
    int group = threadIdx.x >> 2, pair = (threadIdx.x & 3) * 2;
    int problem = blockIdx.x * 8 + group;
    bool real = problem < n;
    float s0 = real ? c[problem] : 0.0f, s1 = s0, s2 = 0.0f, s3 = 0.0f;
    unsigned zero = 0;
    for (int at = 0; at < k; at += STEP) {
        long from = (long)problem * k + at + pair;
        unsigned a0 = two(a, from, real), b0 = two(b, from, real);
#if STEP == 16
        unsigned a2 = two(a, from + 8, real), b1 = two(b, from + 8, real);
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(s0), "+f"(s1), "+f"(s2), "+f"(s3)
            : "r"(a0), "r"(zero), "r"(a2), "r"(zero), "r"(b0), "r"(b1));
#else
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.TYPE.TYPE.f32 "
            "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(s0), "+f"(s1), "+f"(s2), "+f"(s3)
            : "r"(a0), "r"(zero), "r"(b0));
#endif
    }
    if (real && pair == group) d[problem] = s0;
    if (real && pair + 1 == group) d[problem] = s1;
}
"""


def mma_dot(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, shape: str) -> torch.Tensor:
    """c + sum a b over the last axis as a chain of mma.sync of one shape.

    Args:
        a: [n, K] BF16 or FP16 on a GPU, K a multiple of `SHAPES[shape]`.
        b: as `a`.
        c: [n] FP32.
        shape: a key of `SHAPES`.

    Returns:
        [n] FP32.
    """
    n, k = a.shape
    if k % SHAPES[shape]:
        raise ValueError(f"{shape} takes a multiple of {SHAPES[shape]} products, got {k}")
    source = _SOURCE.replace("STEP", str(SHAPES[shape])).replace("TYPE", _TYPES[a.dtype])
    kernel = torch.cuda._compile_kernel(source, "chain")
    a, b, c = a.contiguous(), b.contiguous(), c.contiguous()
    d = torch.full_like(c, float("nan"))
    kernel(((n + 7) // 8, 1, 1), (32, 1, 1), [a, b, c, d, n, k])
    return d
