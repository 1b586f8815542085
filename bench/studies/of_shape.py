"""A study of a model of a real shape, with random weights."""

from __future__ import annotations

import argparse

import torch
from common import arguments
from common.machine import describe
from common.records import Record
from decoding import models

from studies import study


class OfShape(study.Study):
    """Builds the model on its device."""

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add the shape, and where it runs."""
        add = parser.add_argument
        add("--shape", default="llama-3.1-8b", choices=models.SHAPES)
        add("--layers", type=arguments.number, help="fewer than the shape has")
        add("--device", default="cpu", choices=("cpu", "cuda"))
        add("--dtype", default="bfloat16", choices=models.DTYPES)

    def __init__(self, options: argparse.Namespace):
        super().__init__(options)
        self.device = torch.device(options.device)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: there is no GPU")
        dtype = models.DTYPES[options.dtype]
        torch.manual_seed(0)
        self.model = models.random_weights(options.shape, options.layers, dtype, self.device)

    def describes(self) -> Record:
        """Return the machine, and what is measured on it."""
        named = ("shape", "layers", "dtype")
        return {**describe(self.device), **{name: vars(self.options)[name] for name in named}}
