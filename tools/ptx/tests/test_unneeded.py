"""Every barrier, fence and wait of the CUDA and Gluon kernels is needed, or explained."""

import pytest

pytest.importorskip("triton")

from . import mutate, unneeded


def test_what_is_said_to_be_unneeded_stands_in_the_kernels():
    folders = [*(unneeded.ROOT / "triton_kernels").glob("*.py")]
    folders += (unneeded.ROOT / "csrc" / "cuda").iterdir()
    sources = "\n".join(path.read_text() for path in folders)
    for _, text, reason in unneeded.GLUON + unneeded.CUDA:
        assert text.removeprefix("< ") in sources
        assert reason


def test_places_are_looked_up_line_by_line():
    source = (unneeded.ROOT / "csrc" / "cuda" / "merge.cu").read_text().splitlines()
    at = next(i for i, line in enumerate(source, 1) if "__syncwarp();" in line)
    mutation = mutate.Mutation("barrier removed", "merge", {}, f"merge.cu:{at}")
    assert unneeded.why(mutation) == "of a result elsewhere"
    assert unneeded.why(mutate.Mutation("fence removed", "merge", {}, mutation.source)) is None


HOPPER = [name for name in mutate.TARGETS if name.startswith("hopper")]


def unexplained(name):
    """Return the mutants of a target that are neither explained nor caught."""

    def chosen(mutation):
        return mutation.kind in unneeded.KINDS and not unneeded.why(mutation)

    found = mutate.sweep(name, chosen)
    return [str(mutation) for mutation, result, _ in found if result == "harmless"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER)
def test_gluon(compiler_process, name):
    assert compiler_process(unexplained, name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", mutate.CUDA_TARGETS)
def test_cuda(compiler_process, name):
    pytest.importorskip("cupy")
    assert compiler_process(unexplained, name) == []
