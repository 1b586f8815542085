"""Every barrier, fence and wait of the CUDA and Gluon kernels is needed, or explained."""

import pytest

pytest.importorskip("triton")

from . import mutate, unneeded

HOPPER = [name for name in mutate.TARGETS if name.startswith("hopper")]


def test_what_is_said_to_be_unneeded_stands_in_the_kernels():
    folders = [*(unneeded.ROOT / "triton_kernels").glob("*.py")]
    folders += (unneeded.ROOT / "csrc" / "cuda").iterdir()
    sources = "\n".join(path.read_text() for path in folders)
    for _, text, where, reason in unneeded.REASONS:
        assert all(part.strip() in sources for part in text.split("< "))
        assert set(where or ()) <= {*HOPPER, *mutate.CUDA_TARGETS}
        assert reason


def test_places_are_looked_up_line_by_line():
    source = (unneeded.ROOT / "csrc" / "cuda" / "merge.cu").read_text().splitlines()
    at = next(i for i, line in enumerate(source, 1) if "__syncwarp();" in line)
    barrier, fence = (
        mutate.Mutation(kind, "merge", {1: None}, f"merge.cu:{at}")
        for kind in ("barrier removed", "fence removed")
    )
    found = unneeded.explained("cuda merge_states", [barrier, fence])
    assert found == {str(barrier): "of a result elsewhere"}


def held_against_reasons(name):
    """Return which mutants of a target are not caught and unexplained, and explained and caught."""
    found = list(mutate.sweep(name, lambda mutation: mutation.kind in unneeded.KINDS))
    explained = unneeded.explained(name, [mutation for mutation, _, _ in found])
    verdicts = {str(mutation): result for mutation, result, _ in found}
    harmless = {mutant for mutant, result in verdicts.items() if result == "harmless"}
    caught = {mutant for mutant in explained if verdicts[mutant] == "caught"}
    return sorted(harmless - explained.keys()), sorted(caught)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER)
def test_gluon(compiler_process, name):
    assert compiler_process(held_against_reasons, name) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", mutate.CUDA_TARGETS)
def test_cuda(compiler_process, name):
    pytest.importorskip("cupy")
    assert compiler_process(held_against_reasons, name) == ([], [])
