"""The best children of a tree's nodes, compiled for GPUs that are not here and executed."""

import pytest

pytest.importorskip("triton")

from . import levels
from .test_layer_steps import WHOLE, cases


@pytest.mark.parametrize(("name", "arch"), cases(levels.LEVELS))
def test_levels(compiler_process, name, arch):
    compiler_process(levels.check_level, levels.LEVELS[name], arch)


@WHOLE
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_the_lower_node_then_the_lower_token_wins_a_tie(compiler_process, arch):
    compiler_process(levels.check_ties, arch)
