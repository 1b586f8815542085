"""Tests are packages, so mirrored folders may repeat file names: `from tests.cases import ...`."""
