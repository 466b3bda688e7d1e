"""Counting of differing roundings over several trials, and the one check that they make."""

import numpy as np
from numpy.typing import NDArray

from bf16forensics.investigate.doctor.boundaries import differing
from bf16forensics.investigate.doctor.result import FAIL, NOTED, PASS, ROUNDING, Check

_WRONG = "Numbers that the tool prints may be wrong on this machine: do not use them, and report this line."
_RIGHT = "One rounding, to the neighbour that the mode asks for, at every boundary of the format."
_WORKED_AROUND = "The tool does not round by this conversion; other programs that do get other bits."
_AGREES = "Rounds once and right, though the tool does not depend on it."


class Comparison:
    """Results against expectations, trial by trial."""

    def __init__(self, *, name: str, where: str, is_relied_on: bool) -> None:
        """Start without trials.

        Args:
            name: of the check.
            where: of the check.
            is_relied_on: whether a difference is a failure; it is only noted otherwise.
        """
        self._name, self._where, self._is_relied_on = name, where, is_relied_on
        self._total = self._differing = 0
        self._example = ""

    def add(
        self,
        label: str,
        values: NDArray[np.floating],
        found: NDArray[np.floating],
        expected: NDArray[np.float64],
    ) -> None:
        """Compare one trial, bit for bit, NaN equal to NaN.

        Args:
            label: what was rounded how, for the example.
            values: [n] inputs.
            found: [n] results.
            expected: [n] right results.
        """
        is_different = differing(found, expected)
        self._total += len(values)
        self._differing += int(is_different.sum())
        if is_different.any() and not self._example:
            index = _nearest_to_one(values, is_different)
            value, result, right = (float(array[index]) for array in (values, found, expected))
            self._example = f"{label}: {value!r} gives {result!r}, not {right!r}"

    def check(self) -> Check:
        """The check of all trials so far."""
        is_right = self._differing == 0 and self._total > 0
        if is_right:
            status, meaning = PASS, _RIGHT if self._is_relied_on else _AGREES
        else:
            status, meaning = (FAIL, _WRONG) if self._is_relied_on else (NOTED, _WORKED_AROUND)
        counts = f"{self._differing:,} of {self._total:,} differ"
        return Check(
            group=ROUNDING,
            name=self._name,
            where=self._where,
            status=status,
            observed=f"{counts}; {self._example}" if self._example else counts,
            expected="0 differ from exact rounding",
            what_it_means=meaning,
        )


def _nearest_to_one(values: NDArray[np.floating], is_different: NDArray[np.bool_]) -> int:
    """Index of the differing value that is easiest to read."""
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.abs(np.log2(np.abs(values.astype(np.float64))))
    indices = np.flatnonzero(is_different)
    return int(indices[np.argmin(np.nan_to_num(distance[indices], nan=np.inf))])
