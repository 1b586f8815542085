// Attention, what is selected from it and how its states are merged.
#include <utility>

#include "check.h"
#include "operators.h"

using namespace specattn;

namespace {

// The heads of the queries; the KV heads come from `k`.
template <class Problem>
void set_heads(Problem& p, const View& q, const View& k) {
  p.Hq = q.shape[q.dims - 2], p.D = q.shape[q.dims - 1];
  k.expect(of_8_bits(k.dtype) ? k.dtype : p.dtype, {-1, -1, -1, p.D});
  p.cache.type = k.dtype, p.cache.size = size_of(k.dtype);
  p.Hk = k.shape[2];
  if (p.Hk == 0 || p.Hq % p.Hk) q.fail("must have a multiple of the KV heads");
}

template <class Problem>
void set_queries(Problem& p, const View& q, const View& k) {
  p.dtype = floating(q);
  p.B = q.shape[0], p.T = q.shape[1];
  p.q = q.rows();
  set_heads(p, q, k);
}

// Fills in the cache; returns {capacity, pages}.
template <class Problem>
std::pair<int64_t, int64_t> set_cache(Problem& p, const View& k, const View& v, const View& table) {
  Cache& c = p.cache;
  c.k = k.rows(), c.v = v.rows();
  v.expect(k.dtype, {k.shape[0], k.shape[1], p.Hk, v.shape[3]});
  if (!table) {
    k.expect(k.dtype, {p.B, -1, p.Hk, p.D});
    return {k.shape[1], 0};
  }
  table.expect(Dtype::kInt32, {p.B, -1});
  c.block_table = table.as<int32_t>();
  c.table_stride = table.stride[0];
  c.page_size = static_cast<int32_t>(k.shape[1]);
  if (c.page_size == 0) k.fail("has pages of no tokens");
  return {table.shape[1] * k.shape[1], k.shape[0]};
}

void set_scales(Cache& c, const View& k, const View& v, const View& k_scale, const View& v_scale) {
  if (k_scale || v_scale) c.k_scale = scale_rows(k_scale, k), c.v_scale = scale_rows(v_scale, v);
}

// What the lengths and indices of a cache must stay within.
struct CacheBounds {
  int64_t capacity = 0, pages = 0;
  int64_t heads = 0;  // that have lists of their own; 0: there is no cache, or it is not gathered
  int64_t most = 0;   // tokens that a list may have
  const int32_t* starts = nullptr;  // of ragged rows, where each of these has a list

  // `behind(b)` tokens after each length are read too (a tree that lies in the cache).
  template <class Behind>
  void check(const Cache& c, int64_t B, const Behind& behind) const {
    if (heads > 0 && c.per_row) return check_rows_of_lists(c, B);
    if (heads > 0) return check_lists(c, B, heads, most, capacity, pages);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t length = c.listed(b, 0), more = behind(b);
      check_index("cache_seqlens", length, 0, capacity - more);
      check_tokens(c, b, length + more, pages);
    }
  }

 private:
  // As those of so many heads, request by request.
  void check_rows_of_lists(const Cache& c, int64_t B) const {
    for (int64_t b = 0; b < B; ++b) {
      Cache one = c;
      const int64_t first = starts ? starts[b] : 0, rows = starts ? starts[b + 1] - first : heads;
      one.indices += b * c.indices_batch + first * c.indices_row;
      one.lengths += b * c.lengths_batch + first * c.lengths_row;
      one.indices_head = c.indices_row, one.lengths_head = c.lengths_row;
      if (c.block_table) one.block_table += b * c.table_stride;
      if (c.prefix) one.prefix += b * c.prefix_batch;
      check_lists(one, 1, rows, most, capacity, pages);
    }
  }
};

// Fills in the cache and how many tokens of it count.
template <class Problem>
CacheBounds set_prefix(Problem& p, const View& k, const View& v, const View& lengths,
                       const View& table) {
  lengths.expect(Dtype::kInt32, {p.B});
  p.cache.lengths = lengths.as<int32_t>();
  p.cache.lengths_batch = lengths.stride[0];
  const auto [capacity, pages] = set_cache(p, k, v, table);
  return {capacity, pages};
}

// A call and the arrays that it points to.
struct AttentionCall : PlainCall<Attention> {
  int64_t tokens = 0;  // rows of ragged queries
  std::vector<int32_t> no_lengths;
  std::vector<int64_t> collected_rows;
  std::vector<float> sink_values;
  CacheBounds bounds;

  void check() const override {
    if (q_starts) check_rows(q_starts, B, tokens, T);
    bounds.check(cache, B, [this](int64_t b) { return tree.in_cache ? rows(b) : 0; });
  }
};

struct ImportanceCall : PlainCall<Importance> {
  CacheBounds bounds;

  void check() const override {
    bounds.check(cache, B, [](int64_t) { return 0; });
  }
};

struct TopKCall : PlainCall<TopK> {
  void check() const override {
    for (int64_t b = 0; b < rows_outer; ++b) {
      check_index("cache_seqlens", lengths[b * lengths_stride], 0, capacity);
    }
  }
};

// Queries that are ragged where `starts` is given; then no request has more than `most` rows.
void set_queries(AttentionCall& a, const View& q, const View& k, const View& v, const View& starts,
                 std::optional<int64_t> most) {
  a.Dv = v.dims > 0 ? v.shape[v.dims - 1] : 0;
  if (a.Dv % 8 || a.Dv > kMaxValueDim || a.Dv == 0) {
    v.fail("must have a head_dim that is a multiple of 8 up to " + std::to_string(kMaxValueDim));
  }
  if (!starts) return set_queries(a, q, k);
  a.dtype = floating(q, 3);
  starts.expect_dense(Dtype::kInt32, starts.shape[0]);
  if (!most || *most < 1) starts.fail("needs max_seqlen_q, at least 1");
  a.B = starts.shape[0] - 1, a.T = *most, a.tokens = q.shape[0];
  a.q = q.ragged_rows();
  a.q_starts = starts.as<int32_t>();
  set_heads(a, q, k);
}

void set_ragged_tree(AttentionCall& a, const View& k, const View& v, const View& mask) {
  Tree& tree = a.tree;
  if (k) {
    k.expect(a.dtype, {a.tokens, a.Hk, a.D});
    v.expect(a.dtype, {a.tokens, a.Hk, a.Dv});
    tree.k = k.ragged_rows(), tree.v = v.ragged_rows(), tree.size = a.T;
  }
  if (mask) {
    mask.expect(Dtype::kInt64, {a.tokens, ceil_div(a.T, 64)});
    tree.mask = mask.as<int64_t>(), tree.mask_row = mask.stride[0];
  }
}

void set_tree(AttentionCall& a, const View& k, const View& v, const View& mask) {
  if (a.q_starts) return set_ragged_tree(a, k, v, mask);
  Tree& tree = a.tree;
  if (k) {
    k.expect(a.dtype, {a.B, -1, a.Hk, a.D});
    v.expect(a.dtype, {a.B, k.shape[1], a.Hk, a.Dv});
    tree.k = k.rows(), tree.v = v.rows(), tree.size = k.shape[1];
  }
  if (mask) {
    mask.expect(Dtype::kInt64, {mask.shape[0] == 1 ? 1 : a.B, a.T, ceil_div(tree.size, 64)});
    tree.mask = mask.as<int64_t>();
    tree.mask_batch = mask.step(0), tree.mask_row = mask.stride[1];
  }
}

void set_depths(AttentionCall& a, const View& depths) {
  if (!depths) return;
  a.tree.depths = depths.as<int32_t>();
  if (a.q_starts) {
    depths.expect_dense(Dtype::kInt32, a.tokens);
    return;
  }
  depths.expect(Dtype::kInt32, {depths.shape[0] == 1 ? 1 : a.B, a.T});
  a.tree.depths_batch = depths.step(0);
}

// Takes softmax_scale and softcap.
void take_scale(AttentionCall& a, Arguments& next) {
  a.scale = static_cast<float>(next.value<double>());
  a.softcap = static_cast<float>(next.value<double>());
}

void set_sinks(AttentionCall& a, const View& sinks) {
  if (!sinks) return;
  sinks.expect(sinks.dtype, {a.Hq});
  for (int64_t h = 0; h < a.Hq; ++h) a.sink_values.push_back(sinks.number(h * sinks.stride[0]));
  a.sinks = a.sink_values.data();
}

void take_state(AttentionCall& a, Arguments& next) {
  const View out = next.tensor("out"), lse = next.tensor("lse");
  const int row = a.q_starts ? 0 : 1;  // its dimension
  if (a.q_starts) {
    out.expect(a.dtype, {a.tokens, a.Hq, a.Dv});
    lse.expect(Dtype::kFloat32, {a.tokens, a.Hq});
  } else {
    out.expect(a.dtype, {a.B, a.T, a.Hq, a.Dv});
    lse.expect(Dtype::kFloat32, {a.B, a.T, a.Hq});
    a.out_batch = out.stride[0], a.lse_batch = lse.stride[0];
  }
  a.out = out.data, a.lse = lse.as<float>();
  a.out_row = out.stride[row], a.out_head = out.stride[row + 1];
  a.lse_row = lse.stride[row], a.lse_head = lse.stride[row + 1];
}

Made tree_attention(Arguments& next) {
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  const View q = next.tensor("q"), k = next.tensor("k_new"), v = next.tensor("v_new");
  set_queries(a, q, k, v, View("", Value{}), {});
  set_tree(a, k, v, next.tensor("tree_mask"));
  a.no_lengths.resize(static_cast<size_t>(a.B));
  a.cache.lengths = a.no_lengths.data(), a.cache.lengths_batch = 1;
  take_scale(a, next);
  take_state(a, next);
  return call;
}

// Takes what hybrid_tree_attention and verify_attention share.
void take_hybrid(AttentionCall& a, Arguments& next) {
  const View q = next.tensor("q"), k = next.tensor("k_cache"), v = next.tensor("v_cache");
  const View lengths = next.tensor("cache_seqlens");
  const View k_tree = next.tensor("k_tree"), v_tree = next.tensor("v_tree");
  const View mask = next.tensor("tree_mask"), depths = next.tensor("depths");
  const View table = next.tensor("block_table");
  a.window = next.value<std::optional<int64_t>>().value_or(0);
  take_scale(a, next);
  const View sinks = next.tensor("sinks"), starts = next.tensor("cu_seqlens_q");
  set_queries(a, q, k, v, starts, next.value<std::optional<int64_t>>());
  a.tree.in_cache = !k_tree;
  a.tree.size = a.T;
  set_tree(a, k_tree, v_tree, mask);
  set_depths(a, depths);
  const View k_scale = next.strided("k_scale"), v_scale = next.strided("v_scale");
  a.bounds = set_prefix(a, k, v, lengths, table);
  set_scales(a.cache, k, v, k_scale, v_scale);
  a.capacity = a.bounds.capacity;
  set_sinks(a, sinks);
}

Made hybrid_tree_attention(Arguments& next) {
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  take_hybrid(a, next);
  take_state(a, next);
  return call;
}

Made verify_attention(Arguments& next) {
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  take_hybrid(a, next);
  const bool scores = next.value<std::string>() == "scores";
  a.collect = scores ? Collect::kScores : Collect::kLogits;
  a.collected_rows = next.value<std::vector<int64_t>>();
  for (int64_t& row : a.collected_rows) {
    check_index("collect_rows", row, -a.T, a.T - 1);
    row += row < 0 && !a.q_starts ? a.T : 0;
  }
  a.collect_rows = a.collected_rows.data();
  a.num_collect = static_cast<int64_t>(a.collected_rows.size());
  a.per_head = next.value<bool>() || !scores;
  take_state(a, next);
  const View collected = next.tensor("collected");
  if (!a.per_head) {
    collected.expect(Dtype::kFloat32, {a.B, a.capacity});
  } else if (scores) {
    collected.expect(Dtype::kFloat32, {a.B, a.Hk, a.capacity});
  } else {
    collected.expect(Dtype::kBFloat16, {a.B, a.num_collect, a.Hq, a.capacity});
  }
  a.collected = collected.data;
  a.collected_batch = collected.stride[0];
  a.collected_row = scores ? 0 : collected.stride[1];
  a.collected_head = a.per_head ? collected.stride[scores ? 1 : 2] : 0;
  return call;
}

// Lists of positions: of requests, of their KV heads, or of rows.
void set_lists(AttentionCall& a, const View& indices, const View& lengths, bool per_row) {
  Cache& c = a.cache;
  c.indices = indices.as<int32_t>(), c.lengths = lengths.as<int32_t>();
  c.indices_batch = indices.stride[0], c.lengths_batch = lengths.stride[0];
  c.per_row = per_row;
  const int64_t width = indices.shape[indices.dims - 1];
  if (per_row && a.q_starts) {
    indices.expect(Dtype::kInt32, {a.tokens, width});
    lengths.expect(Dtype::kInt32, {a.tokens});
    c.indices_row = c.indices_batch, c.lengths_row = c.lengths_batch;
    c.indices_batch = c.lengths_batch = 0;
    a.bounds.heads = a.T, a.bounds.starts = a.q_starts;
  } else if (per_row) {
    indices.expect(Dtype::kInt32, {a.B, a.T, width});
    lengths.expect(Dtype::kInt32, {a.B, a.T});
    c.indices_row = indices.stride[1], c.lengths_row = lengths.stride[1];
    a.bounds.heads = a.T;
  } else {
    const bool lists = indices.dims == 3, counts = lengths.dims == 2;
    lists ? indices.expect(Dtype::kInt32, {a.B, a.Hk, width})
          : indices.expect(Dtype::kInt32, {a.B, width});
    counts ? lengths.expect(Dtype::kInt32, {a.B, a.Hk}) : lengths.expect(Dtype::kInt32, {a.B});
    c.indices_head = lists ? indices.stride[1] : 0, c.lengths_head = counts ? lengths.stride[1] : 0;
    a.bounds.heads = lists || counts ? a.Hk : 1;
  }
  a.bounds.most = width;
}

Made sparse_gather_attention(Arguments& next) {
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  const View q = next.tensor("q"), k = next.tensor("k_cache"), v = next.tensor("v_cache");
  const View indices = next.tensor("indices"), lengths = next.tensor("index_lengths");
  const View k_new = next.tensor("k_new"), v_new = next.tensor("v_new");
  const View mask = next.tensor("tree_mask"), table = next.tensor("block_table");
  take_scale(a, next);
  const View sinks = next.tensor("sinks"), prefix = next.tensor("cache_seqlens");
  const View starts = next.tensor("cu_seqlens_q");
  set_queries(a, q, k, v, starts, next.value<std::optional<int64_t>>());
  const View k_scale = next.strided("k_scale"), v_scale = next.strided("v_scale");
  set_tree(a, k_new, v_new, mask);
  const auto [capacity, pages] = set_cache(a, k, v, table);
  set_scales(a.cache, k, v, k_scale, v_scale);
  const bool per_row = next.value<bool>();
  set_lists(a, indices, lengths, per_row);
  a.bounds.capacity = capacity, a.bounds.pages = pages;
  Cache& c = a.cache;
  if (prefix) {
    prefix.expect(Dtype::kInt32, {a.B});
    c.prefix = prefix.as<int32_t>(), c.prefix_batch = prefix.stride[0];
  }
  set_sinks(a, sinks);
  take_state(a, next);
  return call;
}

Made importance_scores(Arguments& next) {
  auto call = std::make_unique<ImportanceCall>();
  ImportanceCall& p = *call;
  const View q = next.tensor("q"), k = next.tensor("k_cache");
  const View lengths = next.tensor("cache_seqlens");
  set_queries(p, q, k);
  p.per_head = next.value<bool>();
  p.bounds = set_prefix(p, k, k, lengths, next.tensor("block_table"));
  p.capacity = p.bounds.capacity;
  p.scale = static_cast<float>(next.value<double>());
  const View k_scale = next.strided("k_scale");
  set_scales(p.cache, k, k, k_scale, k_scale);
  const View scores = next.tensor("scores");
  if (p.per_head) {
    scores.expect(Dtype::kFloat32, {p.B, p.Hk, p.capacity});
  } else {
    scores.expect(Dtype::kFloat32, {p.B, p.capacity});
  }
  p.scores = scores.as<float>();
  p.scores_batch = scores.stride[0], p.scores_head = p.per_head ? scores.stride[1] : 0;
  return call;
}

Made select_topk(Arguments& next) {
  auto call = std::make_unique<TopKCall>();
  TopKCall& p = *call;
  const View scores = next.tensor("scores"), lengths = next.tensor("cache_seqlens");
  p.ratio = next.value<std::optional<double>>().value_or(-1);
  p.budget = next.value<std::optional<int64_t>>().value_or(0);
  p.min_tokens = next.value<int64_t>();
  p.keep_first = next.value<int64_t>();
  p.keep_last = next.value<int64_t>();
  const View indices = next.tensor("indices"), counts = next.tensor("index_lengths");
  if (scores.dtype != Dtype::kFloat32 || scores.dims < 2 || scores.dims > 3) {
    scores.fail("must be float32 [B, N] or [B, Hk, N]");
  }
  const bool heads = scores.dims == 3;
  const int64_t B = scores.shape[0], inner = heads ? scores.shape[1] : 1;
  p.rows_outer = B, p.rows_inner = inner, p.capacity = scores.shape[heads ? 2 : 1];
  lengths.expect(Dtype::kInt32, {B});
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
  p.lengths = lengths.as<int32_t>(), p.lengths_stride = lengths.stride[0];
  return call;
}

// Takes out and lse; the sizes of a state come from `outs`.
void take_merged(Merge& p, const View& outs, Arguments& next) {
  const View out = next.tensor("out"), lse = next.tensor("lse");
  const int i = outs.dims - 4;
  if (outs.dtype > Dtype::kFloat16) outs.fail("must be float32, bfloat16 or float16");
  p.dtype = outs.dtype;
  p.B = outs.shape[i], p.T = outs.shape[i + 1], p.H = outs.shape[i + 2], p.D = outs.shape[i + 3];
  if (p.D > kMaxValueDim) outs.fail("must have a head_dim up to " + std::to_string(kMaxValueDim));
  out.expect(p.dtype, {p.B, p.T, p.H, p.D});
  lse.expect(Dtype::kFloat32, {p.B, p.T, p.H});
  p.out = out.data, p.lse = lse.as<float>();
  p.out_batch = out.stride[0], p.out_row = out.stride[1], p.out_head = out.stride[2];
  p.lse_batch = lse.stride[0], p.lse_row = lse.stride[1], p.lse_head = lse.stride[2];
}

Made merge_state(Arguments& next) {
  auto call = std::make_unique<PlainCall<Merge>>();
  Merge& p = *call;
  p.states = 2;
  const View out_a = next.tensor("out_a"), lse_a = next.tensor("lse_a");
  const View out_b = next.tensor("out_b"), lse_b = next.tensor("lse_b");
  if (out_a.dims != 4) out_a.fail("must have 4 dimensions");
  take_merged(p, out_a, next);
  int s = 0;
  for (const auto& [out, lse] : {std::pair{&out_a, &lse_a}, {&out_b, &lse_b}}) {
    p.outs[s] = out->expect(p.dtype, {p.B, p.T, p.H, p.D}).rows();
    p.lses[s] = lse->expect(Dtype::kFloat32, {p.B, p.T, p.H}).as<float>();
    for (int i = 0; i < 3; ++i) p.lse_strides[s][i] = lse->stride[i];
    ++s;
  }
  return call;
}

Made merge_states(Arguments& next) {
  auto call = std::make_unique<PlainCall<Merge>>();
  Merge& p = *call;
  const View outs = next.tensor("outs"), lses = next.tensor("lses");
  if (outs.dims != 5) outs.fail("must have 5 dimensions");
  take_merged(p, outs, next);
  p.states = outs.shape[0];
  lses.expect(Dtype::kFloat32, {p.states, p.B, p.T, p.H});
  p.outs[0] = {outs.data, outs.stride[1], outs.stride[2], outs.stride[3]};
  p.lses[0] = lses.as<float>();
  p.out_state = outs.stride[0], p.lse_state = lses.stride[0];
  for (int i = 0; i < 3; ++i) p.lse_strides[0][i] = lses.stride[i + 1];
  return call;
}

}  // namespace

std::vector<Operator> specattn::attention_operators() {
  return {
      {"tree_attention", &tree_attention},
      {"hybrid_tree_attention", &hybrid_tree_attention},
      {"verify_attention", &verify_attention},
      {"sparse_gather_attention", &sparse_gather_attention},
      {"importance_scores", &importance_scores},
      {"select_topk", &select_topk},
      {"merge_state", &merge_state},
      {"merge_states", &merge_states},
  };
}
