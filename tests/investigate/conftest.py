"""A source of records held in memory: two layers, four heads, several steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from bf16forensics.capture.record import AttentionRecord, LayerWeights
from bf16forensics.capture.source import LossSink, SourceShape
from bf16forensics.emulate.rounding import round_to
from bf16forensics.geometry.geometry import Geometry

LAYERS, HEADS, TOKENS, SIZE, WIDTH = 2, 4, 20, 8, 12


@dataclass
class ListSource:
    """Records by sequence; `changes` are applied to (layer, sequence) when the record is handed out."""

    sequences: list[list[AttentionRecord]]
    layer_weights: list[LayerWeights]
    groups: tuple[int, ...]
    kv_heads: int
    handed_out: list[int] = field(default_factory=list)

    @property
    def shape(self) -> SourceShape:
        first = self.sequences[0][0]
        return SourceShape(
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=self.kv_heads,
            head_size=SIZE,
            width=None if first.x is None else WIDTH,
            num_queries=TOKENS,
            steps=tuple(100 + group for group in self.groups),
            groups=self.groups,
            step_sequences=self.groups.count(0),
        )

    def weights(self, layer: int) -> LayerWeights:
        return self.layer_weights[layer]

    def records(self, sequence: int, on_loss: LossSink) -> Iterator[AttentionRecord]:
        self.handed_out.append(sequence)
        on_loss(float(sequence))
        yield from reversed(self.sequences[sequence])

    def change(self, layer: int, sequence: int, **tensors: object) -> None:
        self.sequences[sequence][layer] = replace(self.sequences[sequence][layer], **tensors)  # type: ignore[arg-type]


@pytest.fixture
def make_source() -> Callable[..., ListSource]:
    def make(groups: tuple[int, ...] = (0, 0, 1, 1), kv_heads: int = HEADS, seed: int = 0) -> ListSource:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return round_to(torch.randn(shape, generator=generator), "bf16")

        sequences = [
            [
                AttentionRecord(
                    layer=layer,
                    sequence=sequence,
                    step=100 + group,
                    storage="bf16",
                    q=round_to(draw(HEADS, TOKENS, SIZE) * 3, "bf16"),
                    k=draw(kv_heads, TOKENS, SIZE),
                    v=draw(kv_heads, TOKENS, SIZE),
                    do=draw(HEADS, TOKENS, SIZE),
                    x=torch.randn(TOKENS, WIDTH, generator=generator),
                    geometry=Geometry(scale=SIZE**-0.5),
                )
                for layer in range(LAYERS)
            ]
            for sequence, group in enumerate(groups)
        ]
        weights = [
            LayerWeights(
                layer=layer,
                w_q=torch.randn(HEADS, SIZE, WIDTH, generator=generator),
                w_k=torch.randn(kv_heads, SIZE, WIDTH, generator=generator),
            )
            for layer in range(LAYERS)
        ]
        return ListSource(sequences=sequences, layer_weights=weights, groups=groups, kv_heads=kv_heads)

    return make
