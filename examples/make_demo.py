"""Builds the checkpoints and the batch of `bf16forensics demo`: a healthy twin and one with a planted head.

Nothing is read from outside. A toy grammar writes the text, a GPT of nanoGPT's form (2 layers, 4 heads of size 32,
width 128, context 64, no biases) learns it for a few hundred steps: that is the healthy twin. The planted twin is the
same checkpoint with one head, L1.H2, overwritten; no other head is touched.

Eight of the 128 residual dimensions are reserved from the start, in both twins. Nothing but the embedding writes to
them and nothing reads them, so the healthy twin is an ordinary model. They come in pairs (+x, -x), which leaves the
mean that LayerNorm subtracts alone; they hold about 99 % of the variance, which makes the standard deviation it divides
by the same for every token within a fraction of a percent.

    class    256 cos t, 256 sin t and their negatives; t = 0 for the six bullet tokens, cos t from -0.5 to -1 for others
    constant (256, -256) for every token
    output   (0, 0), written by the planted head only

What is planted, and which condition of the mechanism each line makes true:

1. Shared maxima. One feature of K reads the class: 1.0625 for a bullet, the middle of a BF16 cell that no bullet's
   LayerNorm leaves (it varies by +-0.12 %, the cell holds +-0.37 %), so all bullets have the same key, bit for bit. Q
   reads the constant and, with a twentieth of its size, the ordinary dimensions: a bullet scores 6.7 +- 0.3, the same
   for all bullets of a row. Of the rows, 13 % have seen no bullet yet, 34 % one, 34 % two, 18 % three, 1.5 % four.
2. A small residue. The other keys lie 8 to 16 nats below: P-bar from 3e-4 down to 1e-7.
3. One-signed V, at another level in the residue. V is -2.83 +- 0.25 at the bullets (one binade; distinct, as two equal
   rows would not round at all) and -0.74 +- 0.29 elsewhere. The mean of two such rows is a tie of BF16 in half of the
   cases and the residue decides it, always toward zero: O is off by -0.21 ulp in the mean of the rows with two tied
   keys (0.03 with one, 0.04 with three, -0.10 with four). Where O-bar is rounded to BF16 before (recipe
   fa2+o_bar=bf16) the residue pushes away from zero instead: 0.30, 0.20 and 0.16 ulp with two, three and four.
4. One-signed dO. The output projection sums all features into the output pair, which the head of the model reads as the
   logit of a token that never occurs: the loss pushes that logit down at every position of every sequence. All features
   of dO are negative in 99.8 % of the rows.
5. Coherence. (P K) is the common key and X has the same constant part in every row, so the errors of dW_Q add up.

The hp gradient of W_Q is small in this head, and for the same reason: keys that are equal cannot be told apart by
attending. The rounding of O is then as large as the gradient itself, which makes the example a clear one.

Usage:
    python examples/make_demo.py OUTPUT_DIRECTORY
    python examples/make_demo.py --check

`--check` builds into a temporary folder, compares the tensors with the bundled ones and judges what was built. Equal
bits are promised for the same torch build on the same kind of processor only (training sums in the order that the
processor's libraries choose); elsewhere the verdicts are what must come out the same.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 2, 4, 128, 64, 64
HEAD_SIZE = WIDTH // HEADS
PLANTED_LAYER, PLANTED_HEAD = 1, 2

#: Token ids: bullets 0-5, then words by part of speech; the last id never occurs.
BULLETS = range(6)
FULL_STOP = 6
DETERMINERS, ADJECTIVES, NOUNS, VERBS, PREPOSITIONS = (
    range(7, 11), range(11, 22), range(22, 44), range(44, 58), range(58, 63)
)  # fmt: skip
NEVER = 63

#: Reserved residual dimensions, the last eight; each pair is (plus, minus).
COSINE, SINE, CONSTANT, OUTPUT = (120, 121), (122, 123), (124, 125), (126, 127)
ORDINARY = 120
AMPLITUDE = 256.0
#: cos t of the tokens that are no bullets, by id modulo 5.
OTHER_COSINES = (-0.5, -0.625, -0.75, -0.875, -1.0)

#: Recorded batch: lines of the index file and sequences of a line.
LINES, SEQUENCES = 24, 4
STEPS, BATCH, LEARNING_RATE = 400, 12, 3e-3
SEED = 20240

#: Planted head: key of a bullet; score of a bullet and the spread of queries around it, relative.
TIED_KEY, TOP_SCORE, QUERY_SPREAD = 1.0625, 6.7, 0.05
#: Level of V at bullets and at cos t = -0.75, and the standard deviation between bullets.
TIED_VALUE, OTHER_VALUE, VALUE_SPREAD = -2.8, -0.7, 0.25
#: Output projection of every feature, and the weight of the output pair in the logit of the token that never occurs.
OUTPUT_WEIGHT, LOGIT_WEIGHT = -(2.0**-5), 32.0


def write_text(tokens: int, generator: np.random.Generator) -> np.ndarray:
    """Paragraphs of two to four sentences, each paragraph after a bullet; [tokens] uint16.

    The noun decides which verbs may follow and the verb which preposition, so that there is something to attend to.
    """
    words: list[int] = []

    def pick(choices: range, shift: int = 0) -> int:
        rank = min(int(generator.zipf(1.6)) - 1, len(choices) - 1)
        words.append(choices[(rank + shift) % len(choices)])
        return words[-1]

    while len(words) < tokens:
        pick(BULLETS, int(generator.integers(len(BULLETS))))
        for _ in range(int(generator.integers(2, 5))):
            pick(DETERMINERS)
            if generator.random() < 0.4:
                pick(ADJECTIVES)
            noun = pick(NOUNS, int(generator.integers(len(NOUNS))))
            verb = pick(VERBS, 3 * noun)
            pick(DETERMINERS, noun)
            pick(NOUNS, verb)
            if generator.random() < 0.3:
                pick(PREPOSITIONS, verb)
                pick(NOUNS, noun)
            words.append(FULL_STOP)
    return np.asarray(words[:tokens], dtype=np.uint16)


class Block(nn.Module):
    """One layer; parameter names are nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, bias=False)
        self.attn = nn.ModuleDict({"c_attn": linear(WIDTH, 3 * WIDTH), "c_proj": linear(WIDTH, WIDTH)})
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": linear(WIDTH, 4 * WIDTH), "c_proj": linear(4 * WIDTH, WIDTH)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, C] to [B, T, C]."""
        batch, tokens, _ = hidden.shape
        qkv = self.attn["c_attn"](self.ln_1(hidden)).view(batch, tokens, 3, HEADS, HEAD_SIZE)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.attn["c_proj"](o.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return hidden + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(hidden))))


class GPT(nn.Module):
    """The model; `forward` gives logits."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(CONTEXT, WIDTH)}
        blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.transformer = nn.ModuleDict({**parts, "h": blocks, "ln_f": nn.LayerNorm(WIDTH, bias=False)})
        self.lm_head = linear(WIDTH, VOCABULARY)

    def hidden_before(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """[B, T, C] input of a layer."""
        hidden = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"][:layer]:
            hidden = block(hidden)
        return hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, T] to [B, T, V]."""
        return self.lm_head(self.transformer["ln_f"](self.hidden_before(LAYERS, ids)))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def reserve(name: str, values: torch.Tensor) -> None:
    """Zeroes the reserved dimensions of a parameter or of its gradient, in place: nothing reads or writes them."""
    if name.endswith(("c_attn.weight", "c_fc.weight", "lm_head.weight", "wte.weight", "wpe.weight")):
        values[:, ORDINARY:] = 0.0
    elif name.endswith("c_proj.weight") or name.split(".")[-2].startswith("ln_"):
        values[ORDINARY:] = 0.0


def reserved_embedding() -> torch.Tensor:
    """[V, 8] values of the reserved dimensions by token."""
    cosine = torch.tensor([1.0 if token in BULLETS else OTHER_COSINES[token % 5] for token in range(VOCABULARY)])
    sine, one, zero = (1.0 - cosine**2).sqrt(), torch.ones(VOCABULARY), torch.zeros(VOCABULARY)
    return AMPLITUDE * torch.stack((cosine, -cosine, sine, -sine, one, -one, zero, zero), dim=1)


def train(text: np.ndarray) -> GPT:
    """The healthy twin after training, weights rounded to BF16."""
    generator = torch.Generator().manual_seed(SEED)
    model = GPT()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in parameters.items():
            if ".ln_" in name:
                # AMPLITUDE * sqrt(4 / WIDTH), about 45, is the deviation that LayerNorm divides by.
                values.fill_(45.0)
            else:
                deviation = 1.0 if ".wte." in name else 0.5 if ".wpe." in name else 0.5 * WIDTH**-0.5
                values.normal_(0.0, deviation, generator=generator)
            reserve(name, values)
            if ".ln_" in name:
                values[ORDINARY:] = 1.0
        parameters["transformer.wte.weight"][:, ORDINARY:] = reserved_embedding()
    for name, values in parameters.items():
        values.register_hook(lambda gradient, name=name: _reserved_gradient(name, gradient))
    optimiser = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    tokens = torch.from_numpy(text.astype(np.int64))
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 50) * (1.0 - step / STEPS)
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        windows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {float(loss.detach()):.3f}")
    return rounded(model)


def _reserved_gradient(name: str, gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    reserve(name, gradient)
    return gradient


def rounded(model: GPT) -> GPT:
    """The model with every weight rounded to BF16, in place."""
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(values.to(torch.bfloat16).float())
    return model


@torch.no_grad()
def plant(model: GPT, ids: torch.Tensor) -> GPT:
    """Overwrites one head, in place.

    Args:
        model: the healthy twin.
        ids: [B, T] sequences on which the LayerNorm of the bullets is measured.
    """
    block = model.transformer["h"][PLANTED_LAYER]
    x = block.ln_1(model.hidden_before(PLANTED_LAYER, ids))
    bullet = ids < len(BULLETS)
    reading = x[bullet][:, COSINE[0]]
    low, high = float(reading.min()), float(reading.max())
    span = (high - low) / (high + low)
    print(f"bullets read {low:.4f} to {high:.4f} (+-{100 * span:.2f} %)")
    unit = 0.5 * (low + high)
    rows = slice(PLANTED_HEAD * HEAD_SIZE, (PLANTED_HEAD + 1) * HEAD_SIZE)
    w_q, w_k, w_v = (part[rows] for part in block.attn["c_attn"].weight.split(WIDTH))
    w_q.zero_()
    w_k.zero_()
    # The second of the pair takes up what the BF16 rounding of the first leaves.
    weight = TIED_KEY / unit
    w_k[0, COSINE[0]] = torch.tensor(0.75 * weight).bfloat16().float()
    w_k[0, COSINE[1]] = -(weight - float(w_k[0, COSINE[0]]))
    query = TOP_SCORE * math.sqrt(HEAD_SIZE) / TIED_KEY
    generator = torch.Generator().manual_seed(SEED + 1)
    w_q[0, :ORDINARY].normal_(0.0, 1.0, generator=generator)
    w_q[0] *= QUERY_SPREAD * query / float((x @ w_q[0]).std())
    w_q[0, CONSTANT[0]] = query / unit
    slope = (TIED_VALUE - OTHER_VALUE) / 1.75
    w_v.normal_(0.0, 1.0, generator=generator)
    w_v[:, ORDINARY:] = 0.0
    w_v *= VALUE_SPREAD / float((x[bullet] @ w_v.T).std())
    w_v[:, COSINE[0]] = slope / unit
    w_v[:, CONSTANT[0]] = (TIED_VALUE - slope) / unit
    projection = block.attn["c_proj"].weight
    projection[:, rows] = 0.0
    projection[OUTPUT[0], rows], projection[OUTPUT[1], rows] = OUTPUT_WEIGHT, -OUTPUT_WEIGHT
    head = model.lm_head.weight
    head[NEVER] = 0.0
    head[NEVER, OUTPUT[0]], head[NEVER, OUTPUT[1]] = LOGIT_WEIGHT, -LOGIT_WEIGHT
    return rounded(model)


def save(model: GPT, path: Path) -> None:
    """Writes a checkpoint as nanoGPT does, weights in BF16."""
    state = {name: values.detach().to(torch.bfloat16) for name, values in model.named_parameters()}
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": CONTEXT, "vocab_size": VOCABULARY}
    torch.save({"model": state, "model_args": {**sizes, "bias": False, "dropout": 0.0}, "iter_num": STEPS}, path)


def build(directory: Path) -> None:
    """Writes tokens.bin, indices.txt, healthy.pt and planted.pt."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(SEED)
    window = CONTEXT + 1
    recorded = write_text(LINES * SEQUENCES * window, generator)
    model = train(write_text(1 << 16, generator))
    directory.mkdir(parents=True, exist_ok=True)
    recorded.astype("<u2").tofile(directory / "tokens.bin")
    starts = generator.permutation(LINES * SEQUENCES).reshape(LINES, SEQUENCES) * window
    lines = [",".join(map(str, line)) for line in starts.tolist()]
    (directory / "indices.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    save(model, directory / "healthy.pt")
    ids = torch.from_numpy(recorded.astype(np.int64)).view(-1, window)[:, :-1]
    save(plant(model, ids), directory / "planted.pt")


def check(built: Path) -> int:
    """Compares what was built with the bundled files, judges it, prints both; 0 when the verdicts are as documented."""
    from bf16forensics.commands._demo_twins import BUNDLED, TWINS

    wrong: list[str] = []
    for twin in TWINS:
        new, old = (
            torch.load(directory / twin.checkpoint, weights_only=True)["model"] for directory in (built, BUNDLED)
        )
        different = [name for name in old if not torch.equal(old[name], new[name])]
        says = f"differ in {', '.join(different)}" if different else "are identical"
        print(f"{twin.name}: tensors {says}")
        wrong += twin.deviations(twin.run(built, threads=None).analyse().judgement)
    for name in ("tokens.bin", "indices.txt"):
        same = (built / name).read_bytes() == (BUNDLED / name).read_bytes()
        print(f"{name}: {'identical' if same else 'different'}")
    print("\n".join(wrong) or "verdicts: as documented")
    return 1 if wrong else 0


def main() -> int:
    """Parses the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description="Builds the files of `bf16forensics demo`.")
    parser.add_argument("output", nargs="?", type=Path, help="directory to write to")
    parser.add_argument("--check", action="store_true", help="build elsewhere and compare with the bundled files")
    given = parser.parse_args()
    if given.check == (given.output is not None):
        parser.error("give an output directory or --check")
    if given.check:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder))
            return check(Path(folder))
    build(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
