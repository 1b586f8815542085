"""What `print(output.statistics)` shows, what drafters' caches take, and how far a prefill is."""

import pytest

from specattn.decoding import LongSpec, Plain, generate
from specattn.decoding.passes import cached_model
from specattn.drafters import LongSpecDrafter
from tests.decoding.models import prompts, tiny_model


def test_a_run_prints_as_a_table():
    found = generate(tiny_model("llama"), prompts([9]), Plain(), max_new_tokens=8).statistics
    lines = str(found).splitlines()
    shown = {line.split("  ")[0]: line for line in lines}
    assert [*shown] == [*found.figures()]
    assert f" {found.tokens_per_second:.1f}  new tokens per second" in shown["tokens/s"]
    assert f" {found.prefill_seconds + found.decode_seconds:.2f} s  " in shown["total"]
    assert " 8  new tokens" in shown["new"]
    assert " -  share of the drafted tokens" in shown["accepted"]


def test_the_caches_of_drafters_are_counted():
    """LongSpec's ring and tree, too; without a drafter there are none."""
    model = tiny_model("llama")
    drafter = LongSpecDrafter.for_target(model, target="tiny").float()
    plain = generate(model, prompts([9]), Plain(), max_new_tokens=4).statistics
    found = generate(model, prompts([9]), LongSpec(drafter), max_new_tokens=4).statistics
    config = drafter.config
    token = 2 * config.num_key_value_heads * config.head_dim * 4
    assert plain.drafter_cache_bytes == 0
    assert found.drafter_cache_bytes > config.window * token
    assert found.drafter_cache_bytes % token == 0
    assert found.to_dict()["drafter_cache_bytes"] == found.drafter_cache_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prefill_says_how_far_it_is_within_a_chunk(monkeypatch, family):
    """A layer counts for its share of the chunk's tokens; the text is the same."""
    model, heard = tiny_model(family), []
    texts = prompts([41])
    expected = generate(model, texts, "plain", max_new_tokens=3).new_tokens
    monkeypatch.setattr(cached_model, "REPORTED_EVERY", -1.0)
    options = {"on_prefill": lambda *report: heard.append(report), "prefill_chunk_size": 20}
    found = generate(model, texts, "plain", max_new_tokens=3, **options)
    assert [list(x) for x in found.new_tokens] == [list(x) for x in expected]
    layers = model.config.num_hidden_layers
    shares = [(start + 20 * n // layers, 40) for start in (0, 20) for n in range(layers)]
    assert sorted(set(heard)) == sorted({*shares, (40, 40)})
    assert heard == sorted(heard)
