"""Documentation of the reasons why nothing can be judged, BF9xx."""

from bf16forensics.verdict.catalogue import Entry

_NOT_NOISE = "'Not significant' is not 'noise': only an upper bound below the harmless limit is."

ENTRIES = (
    Entry(
        code="BF901",
        name="too-few-sequences",
        severity="note",
        title="Fewer than 16 sequences",
        what="There is evidence for these heads, and no verdict.",
        why="Ratios over two sequences can be anything: where two gradients nearly cancel, an error of a "
        "thousandth is reported as many times the gradient.",
        how="n below 16. A sign-flip test over n sequences has 2^(n - 1) outcomes; with 2 it cannot go below p = "
        "0.5, and tens of heads share the level of 0.05.",
        limits="16 is the least, not enough: the estimate of what would decide is printed where it can be made.",
        would_refute="Not applicable: nothing is claimed.",
        next_step="Add sequences: a longer range of lines, or --until-decided, which goes on until every head is "
        "decided.",
        references=("Exact level of a randomisation test: one over the number of its outcomes",),
    ),
    Entry(
        code="BF902",
        name="few-sequences-carry-the-error",
        severity="note",
        title="A few sequences carry the whole error",
        what="There are enough sequences, but the effective number of them is below 10.",
        why="A mean and its bounds, taken over what a few sequences decide, do not hold for the next ones.",
        how="n_effective = (sum w)^2 / sum w^2 over the error powers w of the sequences. Nothing is trimmed, "
        "because trimming would estimate another quantity.",
        limits="Heavy tails are common: with 128 sequences a median head of a small model had about 5. The "
        "estimate of what would decide assumes that n_effective grows with n; with heavy tails it grows more "
        "slowly.",
        would_refute="Not applicable: nothing is claimed.",
        next_step="Add sequences, and look at the sequence that carries the most: what is in it?",
        references=("Kish's effective sample size, for powers instead of survey weights",),
    ),
    Entry(
        code="BF903",
        name="bias-undecided",
        severity="note",
        title="The bias is neither shown nor excluded",
        what="The bounds of the bias of dW_Q's error enclose the harmless limit, or a number they need is not defined.",
        why=f"{_NOT_NOISE} Calling this head healthy would be a guess.",
        how="Noise needs the upper bound of B below the limit for the delta part and for the whole error; bias "
        "needs the lower bound above it and p below 0.05. The sequences that would decide are n * (reach / "
        "limit)^2, where reach is the larger of upper bound and minimum detectable bias, because bounds on B fall "
        "as the root of n.",
        limits="The estimate assumes that further sequences are like these. A number that is NaN or infinite leads "
        "here whatever the others say.",
        would_refute="Not applicable: nothing is claimed.",
        next_step="Add sequences as estimated, or accept a shorter horizon: the limit scales as one over the root "
        "of K.",
        references=("Power of a one-sided test at level 0.05: minimum detectable value at 80 %",),
    ),
    Entry(
        code="BF904",
        name="nothing-compared",
        severity="note",
        title="No row was compared",
        what="After padding and fully masked rows nothing is left for these heads, or the input gave no head at all.",
        why="An empty comparison passes every threshold.",
        how="Rows are (sequence, query) pairs that are real and see at least one key.",
        limits="None known.",
        would_refute="Not applicable: nothing is claimed.",
        next_step="Check masks, padding and the range of lines.",
        references=("A fully masked row has O = 0 and delta = 0 in every recipe",),
    ),
    Entry(
        code="BF905",
        name="no-output-gradient",
        severity="note",
        title="No dO: forward evidence only",
        what="The input has no gradient of the loss with respect to the attention output.",
        why="delta = rowsum(dO * O). Without dO only the output error, the maxima and the norms can be reported.",
        how="The record holds no do, or the batch has no label to form a loss from.",
        limits="A dO made up (ones, random) gives a delta, but not the one that training sees.",
        would_refute="Not applicable: nothing is claimed.",
        next_step="Give a batch with labels, or add do to the record.",
        references=("delta enters the backward of a softmax as dS = P * (dP - delta)",),
    ),
    Entry(
        code="BF906",
        name="coupling-unknown",
        severity="note",
        title="The coupling to W_Q cannot be computed",
        what="delta was compared, but the input X of the projection is unknown, and with it the gradient of W_Q.",
        why="A delta error matters through what it does to the weights. A bias of delta is still reported, as BF201.",
        how="The error of dW_Q is alpha * sum over rows of (delta_lp - delta_hp) * (P K)^T X.",
        limits="None known.",
        would_refute="Not applicable: nothing is claimed.",
        next_step="Add x and w_q to the record, or localize from the checkpoint.",
        references=("dW_Q = alpha * sum over rows of (dS K)^T X",),
    ),
)
