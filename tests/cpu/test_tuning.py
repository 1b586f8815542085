"""The table of values that machines are tuned by: read, checked, and without effect on results."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu
from tests.cases import make_problem
from tests.codes import weights
from tests.cpu import calls
from tests.cpu.tensors import normal
from tests.cpu.test_attention import tree_of
from tests.cpu.test_tiles import tiled
from tests.eight_bits import quantise
from tests.reference.test_eight_bits import as_operators
from tests.states import make_gated_delta

USUAL = {
    "wide": 0, "panels": 0, "lead_lines": 256, "heads_abreast": 8, "stream_ahead": 4096,
    "tile_ahead": 8192, "key_ahead": 1024, "packed_bytes": 16384, "panel_depth": 4096,
    "state_floats": 4096, "linear_pieces": 4, "thread_work": 262144,
}  # fmt: skip
RANGES = {
    "wide": (0, 1, 1), "panels": (0, 1, 1), "lead_lines": (0, 8192, 1), "heads_abreast": (1, 8, 1),
    "stream_ahead": (0, 131072, 64), "tile_ahead": (0, 131072, 64), "key_ahead": (0, 131072, 64),
    "packed_bytes": (4096, 262144, 4096), "panel_depth": (512, 32768, 512),
    "state_floats": (1024, 65536, 1024), "linear_pieces": (1, 64, 1),
    "thread_work": (1024, 1 << 28, 1),
}  # fmt: skip
ZEN_5 = "avx512_bf16 amd 26 48 1024"
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)


def numbers(text):
    return {name: int(value) for name, value in (one.split("=") for one in text.split())}


def text_of(values):
    return " ".join(f"{name}={value}" for name, value in values.items())


@pytest.fixture
def tune(isa):
    """Change values of a code path; its own come back."""
    yield _cpu.tune
    _cpu.use_isa(isa)


@pytest.mark.parametrize(
    "machine",
    [
        "avx2 amd 25 32 512",  # Zen 3
        "avx512_bf16 amd 25 32 1024",  # Zen 4
        "amx intel 6 48 2048",
        "amx_fp16 intel 6 48 2048",
        "avx2 amd 26 48 1024",
        "avx512_bf16 amd 26 32 1024",  # no cache is smaller than what was measured
        "generic other 0 0 0",
    ],
)
def test_what_was_not_measured_otherwise_has_the_usual_values(machine):
    assert numbers(_cpu.tuning_of(machine)) == USUAL


def test_zen_5_and_what_follows_have_a_row():
    found = numbers(_cpu.tuning_of(ZEN_5))
    assert (found["wide"], found["panels"]) == (1, 1)
    assert numbers(_cpu.tuning_of("avx512_bf16 amd 27 64 2048")) == found


def test_a_code_path_has_the_values_of_its_machine(isa):
    assert _cpu.machine().split()[0] == isa
    assert _cpu.tuning() == _cpu.tuning_of(_cpu.machine())


def test_of_several_rows_the_largest_machine_counts():
    table = """
        avx2 amd 26 32 512: key_ahead=64
        avx2 amd 25 32 512: key_ahead=128 linear_pieces=2

        avx2 amd 26 48 512: key_ahead=192
        avx2 intel 6 32 512: key_ahead=256
    """
    for machine, expected in {
        "avx2 amd 25 64 512": (128, 2),
        "avx2 amd 26 32 512": (64, 4),
        "avx2 amd 30 48 1024": (192, 4),
        "avx2 intel 6 32 512": (256, 4),
        "avx2 amd 24 64 1024": (1024, 4),
        "avx512 amd 26 48 1024": (1024, 4),
    }.items():
        found = numbers(_cpu.tuning_of(machine, table))
        assert (found["key_ahead"], found["linear_pieces"]) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("avx2 amd 25 32: wide=1", '"avx2 amd 25 32: wide=1": machine: expected a code path'),
        ("avx2 amd x 32 512:", 'machine: expected a number, got "x"'),
        ("avx2 amd 25 32 512: far=1", 'expected one of wide=0 .*, got "far=1"'),
        ("avx2 amd 25 32 512: key_ahead", 'key_ahead: expected a number, got ""'),
        ("avx2 amd 25 32 512: key_ahead=-64", 'key_ahead: expected a number, got "-64"'),
        ("avx2 amd 25 32 512: key_ahead=100", "key_ahead: expected 0 to 131072 in steps of 64"),
        ("avx2 amd 25 32 512: heads_abreast=9", "heads_abreast: expected 1 to 8 .* got 9"),
        ("avx2 amd 1 1 1:\navx2 amd 1 1 1:", "expected one row for a machine"),
    ],
)
def test_a_bad_row_is_refused_whatever_the_machine(row, message):
    with pytest.raises(ValueError, match=f"tuning, row .*{message}"):
        _cpu.tuning_of("generic other 0 0 0", row)


def test_bad_values_change_nothing(tune):
    before = _cpu.tuning()
    with pytest.raises(ValueError, match="panel_depth: expected 512 to 32768 .* got 511"):
        tune("key_ahead=64 panel_depth=511")
    assert _cpu.tuning() == before
    tune("key_ahead=64")
    assert numbers(_cpu.tuning()) == numbers(before) | {"key_ahead": 64}


def attention(rows, dtype, *, eight_bits=False):
    p = make_problem((900, 70), rows, q_heads=20, kv_heads=10, head_dim=64, dtype=dtype)
    stored, scales = quantise(p, torch.int8, "tokens") if eight_bits else (p, [{}, {}])
    given = {**stored.cache(), **tree_of(p, False), "cache_seqlens": p.cache_seqlens}
    return lambda: calls.hybrid_tree_attention(p.q, **given, **as_operators(scales[False], p))


def linear(weight, outputs, depth, rows, dtype):
    (x,) = normal(1, (rows, depth), dtype=dtype)

    def run():
        out = calls.poisoned(rows, outputs, dtype=dtype)
        _cpu.linear_parts(x, [weight], [None], None, None, out, 2)
        return [out]

    return run


def many_rows(depth):
    x, w = normal(1, (20, depth), (75, depth), dtype=torch.bfloat16)

    def run():
        out = calls.poisoned(20, len(w), dtype=torch.bfloat16)
        _cpu.linear_many_rows(x, [w], [None], None, None, out, 2)
        return [out]

    return run


@functools.cache
def problems(isa):
    """Return calls whose kernels read a value."""
    torch.manual_seed(0)
    found = [attention(2, torch.bfloat16, eight_bits=True)]
    for dtype in (torch.float32, torch.bfloat16):
        found += [attention(rows, dtype) for rows in (1, 3, 9)]
        (w,) = normal(1, (70, 2600), dtype=dtype)
        found += [linear(w, 70, 2600, rows, dtype) for rows in (1, 7, 16)]
        for bits in (8, 4):
            coded = weights(96, 2560, 40, bits, True, torch.bfloat16, 0)
            for one in (coded, tiled(*coded, 2560)):
                found += [linear(one, 96, 2560, rows, dtype) for rows in (1, 16)]
    scored = make_problem((1500,), 4, dtype=torch.bfloat16)
    found.append(lambda: [calls.importance_scores(scored.q, scored.k_cache, scored.cache_seqlens)])
    states = make_gated_delta((16,), 2, 4, 128, 128)
    found.append(lambda: calls.gated_delta_tree(**states.arguments(False)))
    if isa == "avx512_bf16":
        found.append(many_rows(2600))
    return found, [run() for run in found]


@per_isa
@given(
    st.fixed_dictionaries(
        {
            name: st.integers(0, (most - least) // step).map(lambda n, a=least, b=step: a + n * b)
            for name, (least, most, step) in RANGES.items()
        }
    )
)
def test_no_value_changes_a_bit(isa, tune, values):
    found, expected = problems(isa)
    tune(text_of(values))
    assert numbers(_cpu.tuning()) == values
    for run, same in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(run(), same, strict=True))
