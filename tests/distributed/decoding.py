"""What ranks run in the tests of decoding."""

from specattn.decoding import generate
from specattn.distributed import ContextParallel
from tests.decoding.models import prompts, tiny_model
from tests.decoding.settings import settings_of

LENGTHS, NEW_TOKENS = (5, 23, 40), 24


def _run(family, name, block_size, **options):
    """Return the texts of one method, on one rank (`block_size` None) or on all."""
    model = tiny_model(family)
    shared = None if block_size is None else ContextParallel(block_size=block_size)
    output = generate(
        model,
        prompts(LENGTHS),
        settings_of(model)[name],
        max_new_tokens=NEW_TOKENS,
        context_parallel=shared,
        **options,
    )
    return output.new_tokens


def texts(families, names, block_size, options=None):
    """Return the texts of methods by family and name."""
    return {
        (family, name): _run(family, name, block_size, **options or {})
        for family in families
        for name in names
    }
