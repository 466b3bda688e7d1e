"""The two bundled checkpoints of the demo: how each is run, and what must come out."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import bf16forensics
from bf16forensics.attention.backend import REFERENCE
from bf16forensics.commands._given import ModelInput
from bf16forensics.commands._localize_run import LocalizeRun
from bf16forensics.commands._source import open_source

if TYPE_CHECKING:
    from bf16forensics.verdict.findings import Judgement

#: Folder of the bundled files.
BUNDLED = Path(bf16forensics.__file__).parent / "demo"
TOKENS = "tokens.bin"
INDICES = "indices.txt"
_REFERENCE = "fp64"
#: What localize computes in unless it is told otherwise.
_ACTIVATIONS = "amp-bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """One of the checkpoints."""

    #: "planted" or "healthy".
    name: str
    #: File name in the folder.
    checkpoint: str
    #: (layer, head), 0-based, of the head that was overwritten; None for the healthy twin.
    culprit: tuple[int, int] | None
    #: One sentence for the report.
    title: str

    def run(self, directory: Path, *, threads: int | None) -> LocalizeRun:
        """The run of localize on this twin: its defaults, against float64.

        Args:
            directory: folder that holds the checkpoints, the tokens and the index file.
            threads: sequences computed at once; None for one a core.

        Raises:
            InputError: a file is missing or damaged.
        """
        from bf16forensics.recipe.derive import resolve

        started = time.perf_counter()
        recipe = resolve("fa2")
        checkpoint, tokens, indices = (_shown(directory / name) for name in (self.checkpoint, TOKENS, INDICES))
        given = ModelInput(
            checkpoint=checkpoint,
            batch=tokens,
            indices=indices,
            lines=None,
            sequences=None,
            first_step=None,
            n_head=None,
            activations=_ACTIVATIONS,
            recipe=recipe,
        )
        opened = open_source(given, None)
        files = (str(checkpoint), "--batch", str(tokens), "--indices", str(indices))
        return LocalizeRun(
            opened=opened,
            recipe=recipe,
            reference=_REFERENCE,
            backend=REFERENCE,
            step_sequences=None,
            threads=threads,
            until_decided=False,
            observe=False,
            load_s=time.perf_counter() - started,
            command=("bf16forensics", "localize", *files, "--reference", _REFERENCE),
        )

    def deviations(self, judgement: "Judgement") -> list[str]:
        """What came out otherwise than documented, one sentence each; empty when all is as documented."""
        from bf16forensics.verdict.findings import COMPOUNDING_BIAS, NOISE_AT_CHANCE
        from bf16forensics.verdict.words import head_name

        expected = {self.culprit: COMPOUNDING_BIAS} if self.culprit else {}
        found = []
        for head in judgement.heads:
            wanted = expected.get((head.layer, head.head), NOISE_AT_CHANCE)
            if head.verdict != wanted:
                name = head_name(head.layer, head.head)
                found.append(f"{self.name} twin: {name} is {head.verdict!r}, documented is {wanted!r}")
        if self.culprit and judgement.ranking[:1] != (self.culprit,):
            first = head_name(*judgement.ranking[0]) if judgement.ranking else "no head"
            found.append(f"{self.name} twin: {first} comes first, documented is {head_name(*self.culprit)}")
        return found


PLANTED = Twin(
    name="planted",
    checkpoint="planted.pt",
    culprit=(1, 2),
    title="a small GPT in which one head, L1.H2, was overwritten so that its rounding errors share a sign",
)
HEALTHY = Twin(
    name="healthy",
    checkpoint="healthy.pt",
    culprit=None,
    title="the same GPT as it was trained",
)
TWINS = (PLANTED, HEALTHY)


def _shown(path: Path) -> Path:
    """The path as a user would type it: relative where it lies below the working directory."""
    here = Path(os.getcwd())
    return path.relative_to(here) if path.is_relative_to(here) else path
