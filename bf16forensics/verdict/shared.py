"""How findings are made from groups of heads, bounded in number."""

from collections.abc import Callable, Sequence

from bf16forensics.evidence.results import HeadEvidence
from bf16forensics.verdict.catalogue import entry
from bf16forensics.verdict.findings import Finding, HeadVerdict
from bf16forensics.verdict.words import count, head_name, listing

#: One head with its verdict, in the order of the ranking.
Pair = tuple[HeadEvidence, HeadVerdict]

#: Names that a finding about many heads lists.
MAX_NAMES = 12
#: Names that a sentence lists.
SENTENCE_NAMES = 4


def finding(
    code: str,
    *,
    message: str,
    observed: str,
    inferred: str,
    next_command: str,
    heads: Sequence[HeadEvidence] = (),
    severity: str | None = None,
) -> Finding:
    """A finding with what the catalogue knows of its code filled in.

    Args:
        code: code of the catalogue.
        message: one sentence.
        observed: numbers with units.
        inferred: what follows from them.
        next_command: command or step that gets further.
        heads: the heads concerned, the worst first; a single one gives the finding its layer and head.
        severity: another severity than the catalogue's.
    """
    known = entry(code)
    single = heads[0] if len(heads) == 1 else None
    return Finding(
        code=code,
        name=known.name,
        severity=severity or known.severity,
        layer=None if single is None else single.layer,
        head=None if single is None else single.head,
        heads=tuple(head_name(head.layer, head.head) for head in heads[:MAX_NAMES]),
        num_heads=len(heads),
        message=message,
        observed=observed,
        inferred=inferred,
        would_refute=known.would_refute,
        next_command=next_command,
    )


def per_head(pairs: Sequence[Pair], single: int, build: Callable[[Pair], Finding]) -> list[Finding]:
    """One finding a head for the first `single` heads, and one for all heads beyond."""
    found = [build(pair) for pair in pairs[:single]]
    rest = pairs[single:]
    if len(rest) == 1:
        return [*found, build(rest[0])]
    if rest:
        first, example = rest[0], build(rest[0])
        heads = [head for head, _ in rest]
        found.append(
            finding(
                example.code,
                message=f"and {count(len(rest), 'more head')}: {names_of(heads)}",
                observed=f"the first of them: {example.observed}",
                inferred=example.inferred,
                next_command=build(first).next_command,
                heads=heads,
            )
        )
    return found


def names_of(heads: Sequence[HeadEvidence], limit: int = SENTENCE_NAMES) -> str:
    """Names of heads for a sentence: "L1.H7, L0.H2 and 3 more"."""
    return listing([head_name(head.layer, head.head) for head in heads[:limit]], limit, len(heads))
