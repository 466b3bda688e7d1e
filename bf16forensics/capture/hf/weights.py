"""Weights by the model's own names: mapped tensors, and those that transformers merges out of several."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bf16forensics.capture.hf.build import first_line
from bf16forensics.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One application of a conversion of transformers: tensors of the checkpoint in, parameters of the model out.

    A mixture of experts is the common case: a checkpoint has one matrix for each expert, the class one for all.
    """

    #: The `WeightConverter` of transformers, empty.
    converter: Any
    #: The parameter by whose name the converter is called.
    first_name: str
    #: (pattern of the converter, checkpoint name, tensor), in the order in which transformers hands them over.
    sources: tuple[tuple[str, str, torch.Tensor], ...]
    #: Configuration of the model.
    config: Any
    #: The directory, for errors.
    where: str

    def run(self, *, on_meta: bool = False) -> dict[str, torch.Tensor]:
        """The parameters by name, computed anew; shapes and dtypes only when `on_meta`.

        Raises:
            InputError: the tensors do not fit together.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, name, tensor in self.sources:
            converter.add_tensor(self.first_name, name, pattern, tensor.to("meta") if on_meta else tensor)
        try:
            made = converter.convert(self.first_name, config=self.config)
        # Stacking and splitting raise whatever torch raises for shapes that do not fit.
        except Exception as error:
            raise InputError(
                f"{self.where}: {self.first_name} cannot be made from '{self.sources[0][1]}' and "
                f"{len(self.sources) - 1} more tensors ({first_line(error)}); one of them has another shape"
            ) from error
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


class ModelWeights(Mapping[str, torch.Tensor]):
    """Tensors by the model's own names; merged ones are made at each access and never kept."""

    def __init__(self, direct: Mapping[str, torch.Tensor], merged: Mapping[str, Merge]) -> None:
        """Joins the two; `merged` gives for each name the merge that makes it."""
        self._direct = dict(direct)
        self._merged = dict(merged)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor as stored, or merged."""
        if name in self._direct:
            return self._direct[name]
        return self._merged[name].run()[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        yield from self._direct
        yield from self._merged

    def __len__(self) -> int:
        """Number of names."""
        return len(self._direct) + len(self._merged)

    def __contains__(self, name: object) -> bool:
        """True for the name of a weight; makes nothing."""
        return name in self._direct or name in self._merged
