"""Documentation of the findings on inputs, BF4xx."""

from bf16forensics.verdict.catalogue import Entry

ENTRIES = (
    Entry(
        code="BF401",
        name="non-finite-input",
        severity="error",
        title="An input holds NaN or Inf",
        what="A tensor that these heads read holds NaN or Inf. The finding names tensor and first position.",
        why="Comparisons with NaN are false, so that 'error above limit' never fires: a damaged head would look "
        "healthy.",
        how="Every input of every head is tested before anything is compared. The head is reported as 'cannot "
        "judge', leaves every family of tests, and the exit code is 2; the other heads are judged as usual.",
        limits="A NaN in a key that no query sees is reported too, although it cannot reach the output.",
        would_refute="The named position is finite in the file: then the model produced the value, not the file.",
        next_step="Repair or leave out the tensor or the batch. If training produced it, look at earlier "
        "checkpoints: the question is then which step came first.",
        references=("IEEE 754: every comparison with NaN but != is false",),
    ),
    Entry(
        code="BF402",
        name="all-zero-w-q",
        severity="warning",
        title="W_Q of a head is zero",
        what="Every entry of the head's query projection is zero.",
        why="All scores are then equal and every visible key shares the maximum, which looks like the worst "
        "trigger there is. More often the checkpoint is an untrained or a pruned one, or the wrong tensor was read.",
        how="The largest singular value is exactly zero.",
        limits="A bias of the projection can still make scores differ.",
        would_refute="The file holds other numbers for this head.",
        next_step="Check that the checkpoint is the one that was trained, and that no head was pruned.",
        references=("With q = 0 the softmax is uniform over the visible keys",),
    ),
    Entry(
        code="BF404",
        name="no-output-head",
        severity="error",
        title="The checkpoint has no output head",
        what="config.json says that the output head is not tied to the embedding, and the files hold no lm_head.",
        why="Without an output head there is no loss, hence no gradient of the attention output. Loaders fill a "
        "missing head with random numbers and say so in passing; a dO from it would be a made-up one.",
        how="Outputs, maxima and norms are reported. delta and the gradient of W_Q are 'cannot judge' for every head, "
        "and the exit code is 2.",
        limits="A model that was trained as a tied one and saved with a wrong config lands here too.",
        would_refute="The head is in another file of the same model.",
        next_step="Give the whole checkpoint, or correct tie_word_embeddings in config.json.",
        references=("transformers initialises missing tensors and lists them in its load report",),
    ),
    Entry(
        code="BF403",
        name="unused-attention-tensors",
        severity="note",
        title="Attention tensors that the analysis did not apply",
        what="The input holds tensors that belong to attention by name and that were not used.",
        why="If the model applies them (a norm of q and k, a sink, an adapter), the attention judged here is "
        "another one.",
        how="Names of the input minus the names that the model uses, known buffers left out.",
        limits="By name only: a tensor that the training code ignores as well is listed all the same.",
        would_refute="The model's code does not read these tensors.",
        next_step="Compare the list, unused_tensors in the document, with the model's code.",
        references=("The list is complete in the JSON document; the report names the first few",),
    ),
)
