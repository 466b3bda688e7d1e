"""Documentation of the triggers, BF1xx."""

from bf16forensics.verdict.catalogue import Entry

_PAPER = "arXiv 2510.04212, section 3.3 (how repeated maxima and one-signed values make rounding errors add up)"

ENTRIES = (
    Entry(
        code="BF101",
        name="repeated-maxima",
        severity="note",
        title="Rows in which two or more keys have P-bar = 1",
        what="In these rows at least two entries of P-bar = exp(S - rowmax) are 1 after rounding to BF16, so that "
        "the row's output adds up whole values of V instead of one whole value and fractions of others.",
        why="Two BF16 values of V of like sign and exponent add up to a number with one bit too many. If what the "
        "other keys add has a constant sign, the last rounding goes the same way in row after row, and delta gets "
        "a bias. Without that residue the sum is a tie, and ties to even have no preferred direction.",
        how="Counted on P-bar before normalisation, on visible pairs only, from the recipe's own scores. The "
        "finding compares rows with a near-tie (two keys within 1e-3 of the maximum) with rows with a tie (within "
        "2^-9, the distance at which P-bar still rounds to 1). Scores of flat density give the ratio of the two "
        "distances, 0.51; a ratio within 0.1, or within three standard errors of a binomial count, is called 'at "
        "chance level'.",
        limits="The direction depends on the recipe: where the unnormalised O-bar is rounded the error points away "
        "from zero, where only the normalised O is rounded it follows the other keys' values against those at the "
        "maximum, and nearly vanishes when both have the same mean. It shrinks with the number of maxima and with "
        "values of unequal exponents. Maxima alone prove nothing: most trained heads have some, and a first token "
        "that attends to itself only never does. Recipes that anchor rows elsewhere than at the maximum have no "
        "P-bar = 1 although they can have the same trouble. Rows of one sequence are not independent, so the ratio "
        "is a description and not a test.",
        would_refute="The delta error stays the same when the rows with repeated maxima get the high-precision O; "
        "the document gives the share of the sum that disappears, repeated_sum_share.",
        next_step="Look at the same heads for BF201 and BF301. Without these the maxima are harmless so far.",
        references=(_PAPER,),
    ),
    Entry(
        code="BF102",
        name="swamped-rows",
        severity="note",
        title="Rows whose output is the value of a single key",
        what="In a swamped row O_lp equals the value of the top key in over 90 % of the features: everything the "
        "other keys contribute is smaller than half a unit in the last place of the output.",
        why="The error of such a row is the whole contribution of the other keys. It is the same every time the "
        "row is computed, and it has the sign of that contribution: loss of information, and not noise that "
        "averages out.",
        how="A head is named when its swamped rows carry at least 10 % of the squared delta defect. In trained "
        "small models most rows of most heads are swamped and carry about 2 % of it.",
        limits="The share is of squared errors, so that a few large rows count for many small ones. A swamped row "
        "with a small dO changes nothing.",
        would_refute="With the output kept in FP32 the head's delta defect does not shrink by about the share named.",
        next_step="Compare with the recipe that keeps O in FP32 (RECIPE+o=fp32): the part of the defect that goes "
        "was made by the last rounding.",
        references=("Anchored form of the output: O - v_j for the top key j, exact where O_hp - O_lp cancels",),
    ),
    Entry(
        code="BF104",
        name="ones-not-counted",
        severity="note",
        title="P-bar = 1 is not counted in this recipe",
        what="The recipe keeps an older anchor while the row maximum has grown by no more than a threshold, so that "
        "the largest P-bar of a row is anything up to 2^threshold, and a P-bar of 1 can be any key.",
        why="A count of P-bar = 1 would be a number without meaning, and the trigger it stands for is not gone: what "
        "matters is how few significant bits the largest products have, and a P-bar that is a power of two keeps "
        "them as few as a P-bar of 1 does.",
        how="The three counts, the rows with repeated maxima and the share of the delta error that they carry are "
        "left out (null in the document). Everything that rests on outputs and gradients is judged as usual.",
        limits="Near-ties within 1e-3 of the maximum are still counted, from the recipe's own scores.",
        would_refute="Not applicable: nothing is claimed.",
        next_step="Run the same batch with a recipe that anchors at the maximum (fa2, fa3) to see the ties.",
        references=("flash-attention@0251105 flash_attn/cute/softmax.py: conditional rescaling",),
    ),
    Entry(
        code="BF103",
        name="trigger-on-unlabelled-rows",
        severity="note",
        title="Repeated maxima in rows whose label is ignored",
        what="Some of the rows with repeated maxima belong to positions without a label. Padding rows are counted "
        "apart and enter no statistic at all.",
        why="Such rows are attended to and counted, but in the last layer their dO is zero and in earlier layers "
        "it comes only through other positions. A count of maxima dominated by them says little about the gradient.",
        how="A row counts as unlabelled when the batch marks its label as ignored (-100).",
        limits="Records of raw tensors carry no labels, so nothing can be counted apart there.",
        would_refute="The delta defect of the unlabelled rows is as large as that of the others.",
        next_step="Read the counts of BF101 with these rows taken off.",
        references=("Ignored labels are the convention of cross-entropy losses with ignore_index = -100",),
    ),
)
