"""Triton kernels; ships as `bf16forensics.kernels`.

Importing this package needs no Triton; importing any module in it does. A kernel is an optimisation of the reference
in `bf16forensics.attention` and is tested against it. Kernels import nothing from the project but one another.
"""
