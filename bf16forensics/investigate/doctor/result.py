"""What `doctor` found: the environment, the checks, and the arithmetic of the matrix units. No tensors."""

from dataclasses import dataclass

#: Kept what the tool relies on; broke it; a deviation that the tool knows or works around; could not be tried.
PASS, FAIL, NOTED, SKIPPED = "pass", "fail", "noted", "skipped"
STATUSES = (PASS, FAIL, NOTED, SKIPPED)

#: Groups of checks, in the order of a report.
PRECISION, ROUNDING, EXPONENTIALS, SUMS = "fp32 arithmetic", "rounding", "exponentials", "sums of products"
GROUPS = (PRECISION, ROUNDING, EXPONENTIALS, SUMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried."""

    #: One of `GROUPS`.
    group: str
    #: What was tried, in a few words.
    name: str
    #: Where it ran: "cpu", "cuda:0", "interpreter" (Triton's, on the CPU).
    where: str
    #: One of `STATUSES`; "fail" only where the tool relies on it.
    status: str
    #: What came out. For "skipped": why it could not be tried, and what would make it possible.
    observed: str
    #: What comes out where everything is as specified.
    expected: str
    #: What the check, or its outcome, means for the tool's answers.
    what_it_means: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package that the tool uses."""

    name: str
    #: None: not installed.
    version: str | None
    #: The extra that brings it; None for what every installation needs or what only tests use.
    extra: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device, as torch describes it."""

    #: "cuda:0".
    where: str
    name: str
    #: Compute capability, "9.0".
    capability: str
    memory_bytes: int
    #: Version of the kernel driver; None where it cannot be read.
    driver: str | None
    #: Version of CUDA that torch was built for; None for another kind of build.
    cuda: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The machine and what is installed on it."""

    #: Version of Python.
    python: str
    #: "Linux x86_64".
    platform: str
    #: Model of the processor; None where the system does not say.
    cpu: str | None
    #: Vector instructions that torch uses: "AVX2", "AVX512", "DEFAULT".
    vector_isa: str
    #: Threads that torch uses, and processors that this process may run on.
    threads: int
    processors: int
    packages: tuple[Package, ...]
    gpus: tuple[Gpu, ...]
    #: Why no GPU was looked at; None where one was.
    no_gpu: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the process, or variable of its environment, that can change arithmetic."""

    name: str
    #: As found when the command started; None for a variable that is not set.
    value: str | None
    #: Kinds of device ("cpu", "cuda") on whose FP32 products it can cost bits, as it stands, outside the tool.
    reduces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """How a matrix unit adds, measured from outside. Bits are counted below the largest term or the leading bit."""

    #: Fraction bits that terms keep when they are aligned to the largest one (F); None where no limit showed,
    #: as in units that add fewer than three products at once.
    alignment_bits: int | None
    #: What becomes of the bits below: "toward zero", "to nearest even", ..., "irregular"; None without a limit.
    alignment_rounding: str | None
    #: Whether C is aligned with the products and by the same rule; None without a limit.
    aligns_c: bool | None
    #: Products that share one alignment (L); None where no limit, or no end of the block, showed.
    block: int | None
    #: Whether blocks follow one another in the order of k, each starting from the sum before it; None without blocks.
    chains_in_order: bool | None
    #: Whether the places of products inside a block do not matter; None without blocks.
    order_free: bool | None
    #: Fraction bits of the result of a block; None where no limit showed.
    output_bits: int | None
    #: Rounding of that result; None without a limit.
    output_rounding: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMatch:
    """How one accumulation model compares with a unit."""

    #: Name in `floats.accumulate`.
    model: str
    #: Results whose bits differ.
    differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProbe:
    """The matrix unit of one device, by one instruction, for one format of the operands."""

    where: str
    #: "mma.sync", "wgmma".
    instruction: str
    #: Format of A and B: "bf16", "fp16", "e4m3".
    operands: str
    facts: UnitFacts
    #: Dot products compared, and products in each.
    num_vectors: int
    num_products: int
    matches: tuple[ModelMatch, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """The models that agree in every bit."""
        return tuple(match.model for match in self.matches if match.differing == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Everything one run found."""

    system: System
    settings: tuple[Setting, ...]
    checks: tuple[Check, ...]
    units: tuple[UnitProbe, ...]
    #: Wall time, seconds. Volatile: differs between runs.
    wall_s: float

    def count(self, status: str) -> int:
        """Number of checks with a status."""
        return sum(check.status == status for check in self.checks)

    @property
    def verdict(self) -> str:
        """FAIL where something that the tool relies on does not hold, else PASS."""
        return FAIL if self.count(FAIL) else PASS
