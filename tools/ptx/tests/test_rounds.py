"""Draws, walks and moves of a round, compiled for GPUs that are not here and executed."""

import pytest

pytest.importorskip("triton")

from . import rounds

WHOLE = pytest.mark.gpu_code("triton")
ARCHITECTURES = ["sm_90", pytest.param("sm_80", marks=WHOLE)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_draws_and_walks(compiler_process, arch):
    compiler_process(rounds.check_draws, arch, range(4))


@WHOLE
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize(("most", "vocabulary"), [(9, None), (33, 40), (70, 40), (300, 9)])
def test_trees_of_every_size(compiler_process, arch, most, vocabulary):
    compiler_process(rounds.check_draws, arch, range(4, 10), most, vocabulary)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chains_draw_what_rounds_draw(compiler_process, arch):
    compiler_process(rounds.check_chains, arch, range(5))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_moves(compiler_process, arch):
    compiler_process(rounds.check_moves, arch, range(6))


@WHOLE
def test_logits_are_read_once_and_whole(compiler_process):
    counts, logits = compiler_process(rounds.counted)
    assert 32 * counts.sectors_read < 1.15 * logits  # places are read beside them
    assert counts.shared_conflicts == 0
    # A lane's share of a logit, noise included: an H100 issues those of 8 nodes in 4 us.
    assert 32 * counts.total_instructions / (logits / 2) < 110
