"""Where emulated mixed precision and CUDA autocast part: every operation of one layer, forward and backward.

    python examples/benchmarks/autocast_operations.py [--device cpu]

One layer of GPT-2's width behind its attention runs on a GPU under torch.autocast("cuda", bfloat16) and on the CPU
under the emulation. "inherited": each side from its own operands, so that a rounding which flipped moves what follows.
"own": every operation of the emulation gets the GPU's operands, so that only what it does itself can differ.

With --device cpu the emulation takes the GPU's place, to try the script out.
"""

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch.nn import functional

from bf16forensics.emulate.autocast import CudaAutocast
from bf16forensics.emulate.strict import strict_fp32

WIDTH, TOKENS, BATCH = 768, 1024, 4


def drawn(*shape: int, spread: float, seed: int) -> torch.Tensor:
    """Normal numbers from a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def layer(
    device: str, arithmetic: AbstractContextManager[object], seen: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Results and gradients by name, on the CPU; operands are those of `seen` where it is given."""
    hidden = drawn(BATCH, TOKENS, WIDTH, spread=0.03, seed=1).to(device)
    o = drawn(BATCH, TOKENS, WIDTH, spread=0.05, seed=2).bfloat16().to(device).requires_grad_()
    upstream = drawn(BATCH, TOKENS, WIDTH, spread=1e-3, seed=3).to(device)
    shapes = ((WIDTH, WIDTH, 0.004), (4 * WIDTH, WIDTH, 0.02), (WIDTH, 4 * WIDTH, 0.004))
    weights = [drawn(out, inside, spread=s, seed=4 + i).to(device) for i, (out, inside, s) in enumerate(shapes)]
    biases = [drawn(out, spread=0.02, seed=7 + i).to(device) for i, (out, _, _) in enumerate(shapes)]
    norm = [1 + drawn(WIDTH, spread=0.02, seed=10).to(device), drawn(WIDTH, spread=0.02, seed=11).to(device)]

    def operand(name: str, own: torch.Tensor) -> torch.Tensor:
        return own if seen is None else seen[name].to(device).detach().clone().requires_grad_()

    def arriving(name: str, own: torch.Tensor) -> torch.Tensor:
        return own if seen is None else seen[f"d{name}"].to(device)

    with arithmetic:
        a = functional.linear(o, weights[0], biases[0])
        m = hidden + a
        m_in = operand("m", m)
        x = functional.layer_norm(m_in, (WIDTH,), *norm, 1e-5)
        x_in = operand("x", x)
        f = functional.linear(x_in, weights[1], biases[1])
        f_in = operand("f", f)
        g = functional.gelu(f_in)
        g_in = operand("g", g)
        p = functional.linear(g_in, weights[2], biases[2])
        y = m_in + p
    found = {"a": a, "m": m, "x": x, "f": f, "g": g, "p": p, "y": y}
    if seen is None:
        names = ("p", "g", "f", "x", "a", "o")
        gradients = torch.autograd.grad(y, (p, g, f, x, a, o), upstream)
        found |= {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    else:
        found["dg"] = torch.autograd.grad(p, g_in, arriving("p", p))[0]
        found["df"] = torch.autograd.grad(g, f_in, arriving("g", g))[0]
        found["dx"] = torch.autograd.grad(f, x_in, arriving("f", f))[0]
        found["do"] = torch.autograd.grad(a, o, arriving("a", a))[0]
    return {name: value.detach().cpu() for name, value in found.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    real = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else CudaAutocast()
    with strict_fp32():
        there = layer(device, real, None)
        inherited = layer("cpu", CudaAutocast(), None)
        own = layer("cpu", CudaAutocast(), there)
    words = {
        "a": "c_proj of O",
        "m": "residual",
        "x": "layer_norm",
        "f": "c_fc",
        "g": "gelu",
        "p": "c_proj of the MLP",
        "y": "output",
        "dg": "d gelu output",
        "df": "d gelu input",
        "dx": "d layer_norm output",
        "do": "dO",
    }
    print("equal, %             format      inherited      own   distance of own")
    for name, text in words.items():
        wide = there[name].double()
        if not torch.isfinite(wide).all() or there[name].dtype != own[name].dtype:
            raise SystemExit(f"{text}: not finite, or another dtype: the comparison means nothing")
        shares = [100 * (there[name] == side[name]).double().mean().item() for side in (inherited, own)]
        distance = float((own[name].double() - wide).norm() / wide.norm())
        kind = str(there[name].dtype).removeprefix("torch.")
        print(f"{text:20s} {kind:10s} {shares[0]:10.3f} {shares[1]:8.3f}   {distance:.1e}")


if __name__ == "__main__":
    main()
