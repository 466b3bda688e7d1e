"""Small attention records with every value representable in BF16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bf16forensics.capture.record import AttentionRecord
from bf16forensics.emulate.rounding import round_to
from bf16forensics.geometry.geometry import Geometry


@pytest.fixture
def make_record() -> Callable[..., AttentionRecord]:
    def make(
        seed: int = 0,
        *,
        sequence: int = 0,
        heads: int = 2,
        kv_heads: int = 2,
        tokens: int = 24,
        head_size: int = 8,
        width: int = 12,
        sharpness: float = 1.0,
        labelled: torch.Tensor | None = None,
        **geometry: Any,
    ) -> AttentionRecord:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return round_to(torch.randn(shape, generator=generator), "bf16")

        return AttentionRecord(
            layer=0,
            sequence=sequence,
            step=None,
            storage="bf16",
            q=round_to(draw(heads, tokens, head_size) * sharpness, "bf16"),
            k=draw(kv_heads, tokens, head_size),
            v=draw(kv_heads, tokens, head_size),
            do=draw(heads, tokens, head_size),
            x=torch.randn(tokens, width, generator=generator),
            geometry=Geometry(scale=head_size**-0.5, **geometry),
            labelled=labelled,
        )

    return make
