// specattn._cpu: every primitive on views of tensors. Knows no torch; outputs are written in place.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <optional>
#include <vector>

#include "check.h"
#include "run.h"
#include "view.h"

namespace py = pybind11;
using namespace specattn;

namespace {

Dtype floating(const View& q) {
  if (q.dims != 4) q.fail("must have 4 dimensions");
  if (q.dtype > Dtype::kFloat16) q.fail("must be float32, bfloat16 or float16");
  if (q.shape[3] % 8 || q.shape[3] > kMaxHeadDim || q.shape[3] == 0) {
    q.fail("must have a head_dim that is a multiple of 8 up to 256");
  }
  return q.dtype;
}

// Shape of the queries; the KV heads come from `k`.
template <class Problem>
void set_queries(Problem& p, const View& q, const View& k) {
  p.dtype = floating(q);
  p.B = q.shape[0], p.T = q.shape[1], p.Hq = q.shape[2], p.D = q.shape[3];
  p.q = q.rows();
  k.expect(p.dtype, {-1, -1, -1, p.D});
  p.Hk = k.shape[2];
  if (p.Hk == 0 || p.Hq % p.Hk) q.fail("must have a multiple of the KV heads");
}

// Fills in the cache; returns {capacity, pages}.
template <class Problem>
std::pair<int64_t, int64_t> set_cache(Problem& p, const View& k, const View* v, const View& table) {
  Cache& c = p.cache;
  c.k = k.rows();
  c.v = v ? v->rows() : c.k;
  if (v) v->expect(p.dtype, {k.shape[0], k.shape[1], p.Hk, p.D});
  if (!table) {
    k.expect(p.dtype, {p.B, -1, p.Hk, p.D});
    return {k.shape[1], 0};
  }
  table.expect(Dtype::kInt32, {p.B, -1});
  c.block_table = table.as<int32_t>();
  c.table_stride = table.stride[0];
  c.page_size = static_cast<int32_t>(k.shape[1]);
  if (c.page_size == 0) k.fail("has pages of no tokens");
  return {table.shape[1] * k.shape[1], k.shape[0]};
}

template <class Problem>
void set_lengths(Problem& p, const View& seqlens) {
  seqlens.expect(Dtype::kInt32, {p.B});
  p.cache.lengths = seqlens.as<int32_t>();
  p.cache.lengths_batch = seqlens.stride[0];
}

void set_tree(Attention& a, const View& k, const View& v, const View& mask, const View& depths) {
  Tree& tree = a.tree;
  if (k) {
    k.expect(a.dtype, {a.B, -1, a.Hk, a.D});
    v.expect(a.dtype, {a.B, k.shape[1], a.Hk, a.D});
    tree.k = k.rows(), tree.v = v.rows(), tree.size = k.shape[1];
  }
  if (mask) {
    mask.expect(Dtype::kInt64, {mask.shape[0] == 1 ? 1 : a.B, a.T, ceil_div(tree.size, 64)});
    tree.mask = mask.as<int64_t>();
    tree.mask_batch = mask.step(0), tree.mask_row = mask.stride[1];
  }
  if (depths) {
    depths.expect(Dtype::kInt32, {depths.shape[0] == 1 ? 1 : a.B, a.T});
    tree.depths = depths.as<int32_t>();
    tree.depths_batch = depths.step(0);
  }
}

void set_result(Attention& a, const View& sinks, double scale, double softcap, const View& out,
                const View& lse) {
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap);
  if (sinks) a.sinks = sinks.expect(Dtype::kFloat32, {a.Hq}).as<float>();
  out.expect(a.dtype, {a.B, a.T, a.Hq, a.D});
  lse.expect(Dtype::kFloat32, {a.B, a.T, a.Hq});
  a.out = out.data, a.lse = lse.as<float>();
  a.out_batch = out.stride[0], a.out_row = out.stride[1], a.out_head = out.stride[2];
  a.lse_batch = lse.stride[0], a.lse_row = lse.stride[1], a.lse_head = lse.stride[2];
}

template <class Problem>
void run_unlocked(const Problem& p, int threads) {
  const py::gil_scoped_release release;
  run(p, threads > 1 ? threads : 1);
}

// tree_attention, hybrid_tree_attention and verify_attention: a call without `k_cache` has no
// prefix.
void attention(py::handle q_, py::handle k_cache, py::handle v_cache, py::handle cache_seqlens,
               py::handle k_tree, py::handle v_tree, py::handle tree_mask, py::handle depths,
               py::handle block_table, int64_t window, double scale, double softcap,
               py::handle sinks, py::handle out, py::handle lse, const std::string& collect,
               std::vector<int64_t> collect_rows, py::handle collected_, int threads) {
  const View q("q", q_), k("k_cache", k_cache), v("v_cache", v_cache),
      table("block_table", block_table);
  const View k_new("k_tree", k_tree), v_new("v_tree", v_tree), collected("collected", collected_);
  const View seqlens("cache_seqlens", cache_seqlens), mask("tree_mask", tree_mask);
  Attention a;
  set_queries(a, q, k ? k : k_new);
  a.window = window;
  a.tree.in_cache = !k_new;
  if (!k_new) a.tree.size = a.T;
  set_tree(a, k_new, v_new, mask, View("depths", depths));
  set_result(a, View("sinks", sinks), scale, softcap, View("out", out), View("lse", lse));
  const std::vector<int32_t> none(static_cast<size_t>(a.B), 0);
  if (k) {
    set_lengths(a, seqlens);
    const auto [capacity, pages] = set_cache(a, k, &v, table);
    const int64_t behind = a.tree.in_cache ? a.T : 0;
    check_lengths(a.cache, "cache_seqlens", a.B, 1, capacity, behind);
    check_pages(a.cache, a.B, pages, behind);
    a.capacity = capacity;
  } else {
    a.cache.lengths = none.data();
    a.cache.lengths_batch = 1;
  }
  if (collected) {
    a.collect = collect == "scores" ? Collect::kScores : Collect::kLogits;
    for (int64_t& row : collect_rows) {
      check_index("collect_rows", row, -a.T, a.T - 1);
      row += row < 0 ? a.T : 0;
    }
    a.collect_rows = collect_rows.data();
    a.num_collect = static_cast<int64_t>(collect_rows.size());
    const bool scores = a.collect == Collect::kScores;
    if (scores) {
      collected.expect(Dtype::kFloat32, {a.B, a.Hk, a.capacity});
    } else {
      collected.expect(Dtype::kBFloat16, {a.B, a.num_collect, a.Hq, a.capacity});
    }
    a.collected = collected.data;
    a.collected_batch = collected.stride[0];
    a.collected_row = scores ? 0 : collected.stride[1];
    a.collected_head = collected.stride[scores ? 1 : 2];
  }
  run_unlocked(a, threads);
}

void gather(py::handle q_, py::handle k_cache, py::handle v_cache, py::handle indices_,
            py::handle index_lengths, py::handle k_new, py::handle v_new, py::handle tree_mask,
            py::handle block_table, double scale, double softcap, py::handle sinks, py::handle out,
            py::handle lse, int threads) {
  const View q("q", q_), k("k_cache", k_cache), v("v_cache", v_cache);
  const View indices("indices", indices_), lengths("index_lengths", index_lengths);
  Attention a;
  set_queries(a, q, k);
  set_tree(a, View("k_new", k_new), View("v_new", v_new), View("tree_mask", tree_mask),
           View("depths", py::none()));
  set_result(a, View("sinks", sinks), scale, softcap, View("out", out), View("lse", lse));
  const auto [capacity, pages] = set_cache(a, k, &v, View("block_table", block_table));
  const bool lists = indices.dims == 3, counts = lengths.dims == 2;
  if (lists) {
    indices.expect(Dtype::kInt32, {a.B, a.Hk, -1});
  } else {
    indices.expect(Dtype::kInt32, {a.B, -1});
  }
  if (counts) {
    lengths.expect(Dtype::kInt32, {a.B, a.Hk});
  } else {
    lengths.expect(Dtype::kInt32, {a.B});
  }
  Cache& c = a.cache;
  c.indices = indices.as<int32_t>();
  c.indices_batch = indices.stride[0], c.indices_head = lists ? indices.stride[1] : 0;
  c.lengths = lengths.as<int32_t>();
  c.lengths_batch = lengths.stride[0], c.lengths_head = counts ? lengths.stride[1] : 0;
  const int64_t heads = lists || counts ? a.Hk : 1;
  check_lengths(c, "index_lengths", a.B, heads, indices.shape[indices.dims - 1], 0);
  check_positions(c, a.B, heads, capacity, pages);
  run_unlocked(a, threads);
}

void importance_scores(py::handle q_, py::handle k_cache, py::handle cache_seqlens, bool per_head,
                       py::handle block_table, double scale, py::handle scores_, int threads) {
  const View q("q", q_), k("k_cache", k_cache), scores("scores", scores_);
  Importance p;
  set_queries(p, q, k);
  set_lengths(p, View("cache_seqlens", cache_seqlens));
  const auto [capacity, pages] = set_cache(p, k, nullptr, View("block_table", block_table));
  check_lengths(p.cache, "cache_seqlens", p.B, 1, capacity, 0);
  check_pages(p.cache, p.B, pages, 0);
  if (per_head) {
    scores.expect(Dtype::kFloat32, {p.B, p.Hk, capacity});
  } else {
    scores.expect(Dtype::kFloat32, {p.B, capacity});
  }
  p.scale = static_cast<float>(scale);
  p.per_head = per_head;
  p.capacity = capacity;
  p.scores = scores.as<float>();
  p.scores_batch = scores.stride[0], p.scores_head = per_head ? scores.stride[1] : 0;
  run_unlocked(p, threads);
}

void select_topk(py::handle scores_, py::handle cache_seqlens, std::optional<double> ratio,
                 std::optional<int64_t> budget, int64_t min_tokens, int64_t keep_first,
                 int64_t keep_last, py::handle indices_, py::handle index_lengths, int threads) {
  const View scores("scores", scores_), seqlens("cache_seqlens", cache_seqlens);
  const View indices("indices", indices_), counts("index_lengths", index_lengths);
  if (scores.dtype != Dtype::kFloat32 || scores.dims < 2 || scores.dims > 3) {
    scores.fail("must be float32 [B, N] or [B, Hk, N]");
  }
  const bool heads = scores.dims == 3;
  const int64_t B = scores.shape[0], inner = heads ? scores.shape[1] : 1;
  TopK p;
  p.rows_outer = B, p.rows_inner = inner, p.capacity = scores.shape[heads ? 2 : 1];
  seqlens.expect(Dtype::kInt32, {B});
  if (heads) {
    indices.expect(Dtype::kInt32, {B, inner, -1});
    counts.expect(Dtype::kInt32, {B, inner});
  } else {
    indices.expect(Dtype::kInt32, {B, -1});
    counts.expect(Dtype::kInt32, {B});
  }
  p.scores = scores.as<float>(), p.indices = indices.as<int32_t>(), p.counts = counts.as<int32_t>();
  p.scores_outer = scores.stride[0], p.scores_inner = heads ? scores.stride[1] : 0;
  p.indices_outer = indices.stride[0], p.indices_inner = heads ? indices.stride[1] : 0;
  p.counts_outer = counts.stride[0], p.counts_inner = heads ? counts.stride[1] : 0;
  p.width = indices.shape[heads ? 2 : 1];
  p.lengths = seqlens.as<int32_t>(), p.lengths_stride = seqlens.stride[0];
  for (int64_t b = 0; b < B; ++b) {
    check_index("cache_seqlens", p.lengths[b * p.lengths_stride], 0, p.capacity);
  }
  p.ratio = ratio.value_or(-1), p.budget = budget.value_or(0);
  p.min_tokens = min_tokens, p.keep_first = keep_first, p.keep_last = keep_last;
  run_unlocked(p, threads);
}

void set_merged(Merge& p, const View& outs, const View& out, const View& lse) {
  const int i = outs.dims - 4;
  if (outs.dtype > Dtype::kFloat16) outs.fail("must be float32, bfloat16 or float16");
  p.dtype = outs.dtype;
  p.B = outs.shape[i], p.T = outs.shape[i + 1], p.H = outs.shape[i + 2], p.D = outs.shape[i + 3];
  if (p.D > kMaxHeadDim) outs.fail("must have a head_dim up to 256");
  out.expect(p.dtype, {p.B, p.T, p.H, p.D});
  lse.expect(Dtype::kFloat32, {p.B, p.T, p.H});
  p.out = out.data, p.lse = lse.as<float>();
  p.out_batch = out.stride[0], p.out_row = out.stride[1], p.out_head = out.stride[2];
  p.lse_batch = lse.stride[0], p.lse_row = lse.stride[1], p.lse_head = lse.stride[2];
}

void merge_state(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b,
                 py::handle out, py::handle lse, int threads) {
  const View outs[2] = {View("out_a", out_a), View("out_b", out_b)};
  const View lses[2] = {View("lse_a", lse_a), View("lse_b", lse_b)};
  Merge p;
  p.states = 2;
  if (outs[0].dims != 4) outs[0].fail("must have 4 dimensions");
  set_merged(p, outs[0], View("out", out), View("lse", lse));
  for (int s = 0; s < 2; ++s) {
    outs[s].expect(p.dtype, {p.B, p.T, p.H, p.D});
    lses[s].expect(Dtype::kFloat32, {p.B, p.T, p.H});
    p.outs[s] = outs[s].rows();
    p.lses[s] = lses[s].as<float>();
    for (int i = 0; i < 3; ++i) p.lse_strides[s][i] = lses[s].stride[i];
  }
  run_unlocked(p, threads);
}

void merge_states(py::handle outs_, py::handle lses_, py::handle out, py::handle lse, int threads) {
  const View outs("outs", outs_), lses("lses", lses_);
  Merge p;
  if (outs.dims != 5) outs.fail("must have 5 dimensions");
  set_merged(p, outs, View("out", out), View("lse", lse));
  p.states = outs.shape[0];
  lses.expect(Dtype::kFloat32, {p.states, p.B, p.T, p.H});
  p.outs[0] = {outs.data, outs.stride[1], outs.stride[2], outs.stride[3]};
  p.lses[0] = lses.as<float>();
  p.out_state = outs.stride[0], p.lse_state = lses.stride[0];
  for (int i = 0; i < 3; ++i) p.lse_strides[0][i] = lses.stride[i + 1];
  run_unlocked(p, threads);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() =
      "Attention primitives for the CPU on views (address, shape, strides, dtype) of tensors.";
  if (const char* forced = std::getenv("SPECATTN_CPU_ISA")) use_isa(forced);
  m.def("isas", &isas, "Code paths that this processor has, best first.");
  m.def("isa", &isa, "The code path in use.");
  m.def("use_isa", &use_isa, "Force a code path, for tests and comparisons.");
  m.def(
      "read",
      [](uintptr_t memory, int64_t bytes, int threads) {
        read(reinterpret_cast<const void*>(memory), bytes, threads);
      },
      py::arg("address"), py::arg("bytes"), py::arg("threads"),
      py::call_guard<py::gil_scoped_release>(),
      "Read memory once and do nothing with it: the ceiling that kernels are held against.");
  m.def("read_bandwidth", &read_bandwidth, py::arg("bytes") = int64_t{1} << 28,
        py::arg("threads") = 1, py::arg("repeats") = 5, py::call_guard<py::gil_scoped_release>(),
        "Bytes per second of the best of some streaming reads of fresh memory.");
  m.def("attention", &attention);
  m.def("sparse_gather_attention", &gather);
  m.def("importance_scores", &importance_scores);
  m.def("select_topk", &select_topk);
  m.def("merge_state", &merge_state);
  m.def("merge_states", &merge_states);
}
