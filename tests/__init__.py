"""Tests are packages, so that mirrored folders may repeat file names: `from tests.cases import ...`."""
