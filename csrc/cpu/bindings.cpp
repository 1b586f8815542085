// specattn._cpu: every primitive under its name, with the arguments of its torch operator and then
// the number of threads. Outputs are written in place.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <optional>
#include <vector>

#include "check.h"
#include "graph.h"
#include "view.h"

namespace py = pybind11;
using namespace specattn;

namespace {

// A graph, and the tensors that its calls point into.
class PyGraph {
 public:
  // What is recorded by this thread, or null.
  static PyGraph*& recording() {
    static thread_local PyGraph* graph = nullptr;
    return graph;
  }

  void begin() {
    if (recording()) throw std::invalid_argument("this thread records another graph already");
    recording() = this;
  }
  void end(const py::args&) { recording() = nullptr; }
  void add(std::unique_ptr<const Call> call, const py::args& arguments) {
    graph_.add(std::move(call));
    // A list may be changed later: what it holds now is kept.
    for (const py::handle one : arguments) {
      tensors_.push_back(py::isinstance<py::list>(one) ? py::tuple(one.cast<py::list>())
                                                       : one.cast<py::object>());
    }
  }
  void replay(int threads) const {
    const py::gil_scoped_release release;
    graph_.replay(threads > 1 ? threads : 1);
  }
  size_t size() const { return graph_.size(); }

 private:
  Graph graph_;
  std::vector<py::object> tensors_;
};

// The arguments of an operator, taken in the order of its signature; the number of threads is last.
class Arguments {
 public:
  explicit Arguments(const py::args& all) : all_(all) {}

  View tensor(const char* name) { return {name, next()}; }
  template <class T>
  T value() {
    return next().cast<T>();
  }

  // Checks and runs a call whose arguments have all been taken; a graph keeps it.
  void run(std::unique_ptr<const Call> call) {
    const int threads = value<int>();
    if (at_ != PyTuple_GET_SIZE(all_.ptr())) throw py::type_error("too many arguments");
    call->check();
    {
      const py::gil_scoped_release release;
      call->run(threads > 1 ? threads : 1);
    }
    if (PyGraph* const graph = PyGraph::recording()) graph->add(std::move(call), all_);
  }

 private:
  py::handle next() {
    if (at_ == PyTuple_GET_SIZE(all_.ptr())) throw py::type_error("too few arguments");
    return PyTuple_GET_ITEM(all_.ptr(), at_++);
  }

  const py::args& all_;
  py::ssize_t at_ = 0;
};

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
std::pair<int64_t, int64_t> set_cache(Problem& p, const View& k, const View& v, const View& table) {
  Cache& c = p.cache;
  c.k = k.rows(), c.v = v.rows();
  v.expect(p.dtype, {k.shape[0], k.shape[1], p.Hk, p.D});
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

// What the lengths and indices of a cache must stay within.
struct CacheBounds {
  int64_t heads = 0;  // that have lengths of their own; 0: there is no cache
  int64_t most = 0;   // tokens that a length may count
  int64_t capacity = 0, pages = 0, behind = 0;

  void check(const Cache& c, int64_t B) const {
    if (heads == 0) return;
    check_lengths(c, c.indices ? "index_lengths" : "cache_seqlens", B, heads, most, behind);
    if (c.indices) {
      check_positions(c, B, heads, capacity, pages);
    } else {
      check_pages(c, B, pages, behind);
    }
  }
};

// Fills in the cache and how many tokens of it count, then `behind` more.
template <class Problem>
CacheBounds set_prefix(Problem& p, const View& k, const View& v, const View& lengths,
                       const View& table, int64_t behind) {
  lengths.expect(Dtype::kInt32, {p.B});
  p.cache.lengths = lengths.as<int32_t>();
  p.cache.lengths_batch = lengths.stride[0];
  const auto [capacity, pages] = set_cache(p, k, v, table);
  return {1, capacity, capacity, pages, behind};
}

// A call and the arrays that it points to.
struct AttentionCall : PlainCall<Attention> {
  std::vector<int32_t> no_lengths;
  std::vector<int64_t> rows;
  std::vector<float> sink_values;
  CacheBounds bounds;

  void check() const override { bounds.check(cache, B); }
};

struct ImportanceCall : PlainCall<Importance> {
  CacheBounds bounds;

  void check() const override { bounds.check(cache, B); }
};

struct TopKCall : PlainCall<TopK> {
  void check() const override {
    for (int64_t b = 0; b < rows_outer; ++b) {
      check_index("cache_seqlens", lengths[b * lengths_stride], 0, capacity);
    }
  }
};

void set_tree(AttentionCall& a, const View& k, const View& v, const View& mask) {
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
}

void set_depths(AttentionCall& a, const View& depths) {
  if (!depths) return;
  depths.expect(Dtype::kInt32, {depths.shape[0] == 1 ? 1 : a.B, a.T});
  a.tree.depths = depths.as<int32_t>();
  a.tree.depths_batch = depths.step(0);
}

// Takes softmax_scale and softcap.
void take_scale(AttentionCall& a, Arguments& next) {
  a.scale = static_cast<float>(next.value<double>());
  a.softcap = static_cast<float>(next.value<double>());
}

void take_sinks(AttentionCall& a, Arguments& next) {
  const View sinks = next.tensor("sinks");
  if (!sinks) return;
  sinks.expect(sinks.dtype, {a.Hq});
  for (int64_t h = 0; h < a.Hq; ++h) a.sink_values.push_back(sinks.number(h * sinks.stride[0]));
  a.sinks = a.sink_values.data();
}

void take_state(AttentionCall& a, Arguments& next) {
  const View out = next.tensor("out"), lse = next.tensor("lse");
  out.expect(a.dtype, {a.B, a.T, a.Hq, a.D});
  lse.expect(Dtype::kFloat32, {a.B, a.T, a.Hq});
  a.out = out.data, a.lse = lse.as<float>();
  a.out_batch = out.stride[0], a.out_row = out.stride[1], a.out_head = out.stride[2];
  a.lse_batch = lse.stride[0], a.lse_row = lse.stride[1], a.lse_head = lse.stride[2];
}

void tree_attention(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  const View q = next.tensor("q"), k = next.tensor("k_new"), v = next.tensor("v_new");
  set_queries(a, q, k);
  set_tree(a, k, v, next.tensor("tree_mask"));
  a.no_lengths.resize(static_cast<size_t>(a.B));
  a.cache.lengths = a.no_lengths.data(), a.cache.lengths_batch = 1;
  take_scale(a, next);
  take_state(a, next);
  next.run(std::move(call));
}

// Takes what hybrid_tree_attention and verify_attention share.
void take_hybrid(AttentionCall& a, Arguments& next) {
  const View q = next.tensor("q"), k = next.tensor("k_cache"), v = next.tensor("v_cache");
  const View lengths = next.tensor("cache_seqlens");
  const View k_tree = next.tensor("k_tree"), v_tree = next.tensor("v_tree");
  set_queries(a, q, k);
  a.tree.in_cache = !k_tree;
  a.tree.size = a.T;
  set_tree(a, k_tree, v_tree, next.tensor("tree_mask"));
  set_depths(a, next.tensor("depths"));
  const int64_t behind = a.tree.in_cache ? a.T : 0;
  a.bounds = set_prefix(a, k, v, lengths, next.tensor("block_table"), behind);
  a.capacity = a.bounds.capacity;
  a.window = next.value<std::optional<int64_t>>().value_or(0);
  take_scale(a, next);
  take_sinks(a, next);
}

void hybrid_tree_attention(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  take_hybrid(a, next);
  take_state(a, next);
  next.run(std::move(call));
}

void verify_attention(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  take_hybrid(a, next);
  const bool scores = next.value<std::string>() == "scores";
  a.collect = scores ? Collect::kScores : Collect::kLogits;
  a.rows = next.value<std::vector<int64_t>>();
  for (int64_t& row : a.rows) {
    check_index("collect_rows", row, -a.T, a.T - 1);
    row += row < 0 ? a.T : 0;
  }
  a.collect_rows = a.rows.data();
  a.num_collect = static_cast<int64_t>(a.rows.size());
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
  next.run(std::move(call));
}

void sparse_gather_attention(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<AttentionCall>();
  AttentionCall& a = *call;
  const View q = next.tensor("q"), k = next.tensor("k_cache"), v = next.tensor("v_cache");
  const View indices = next.tensor("indices"), lengths = next.tensor("index_lengths");
  const View k_new = next.tensor("k_new"), v_new = next.tensor("v_new");
  set_queries(a, q, k);
  set_tree(a, k_new, v_new, next.tensor("tree_mask"));
  const auto [capacity, pages] = set_cache(a, k, v, next.tensor("block_table"));
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
  a.bounds = {heads, indices.shape[indices.dims - 1], capacity, pages, 0};
  take_scale(a, next);
  take_sinks(a, next);
  take_state(a, next);
  next.run(std::move(call));
}

void importance_scores(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<ImportanceCall>();
  ImportanceCall& p = *call;
  const View q = next.tensor("q"), k = next.tensor("k_cache");
  const View lengths = next.tensor("cache_seqlens");
  set_queries(p, q, k);
  p.per_head = next.value<bool>();
  p.bounds = set_prefix(p, k, k, lengths, next.tensor("block_table"), 0);
  p.capacity = p.bounds.capacity;
  p.scale = static_cast<float>(next.value<double>());
  const View scores = next.tensor("scores");
  if (p.per_head) {
    scores.expect(Dtype::kFloat32, {p.B, p.Hk, p.capacity});
  } else {
    scores.expect(Dtype::kFloat32, {p.B, p.capacity});
  }
  p.scores = scores.as<float>();
  p.scores_batch = scores.stride[0], p.scores_head = p.per_head ? scores.stride[1] : 0;
  next.run(std::move(call));
}

void select_topk(const py::args& all) {
  Arguments next(all);
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
  next.run(std::move(call));
}

// Takes out and lse; the sizes of a state come from `outs`.
void take_merged(Merge& p, const View& outs, Arguments& next) {
  const View out = next.tensor("out"), lse = next.tensor("lse");
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

void merge_state(const py::args& all) {
  Arguments next(all);
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
  next.run(std::move(call));
}

void merge_states(const py::args& all) {
  Arguments next(all);
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
  next.run(std::move(call));
}

struct EmbedCall : PlainCall<Embed> {
  void check() const override {
    for (int64_t i = 0; i < B * T; ++i) check_index("tokens", token(i), 0, vocabulary - 1);
  }
};

struct RotateCall : PlainCall<RotateHeads> {
  bool stores = false;

  void check() const override {
    for (int64_t b = 0; b < B; ++b) {
      if (stores && first_slot < 0) check_index("prefix", prefix[b], 0, capacity - T);
      for (int64_t t = 0; t < T; ++t) {
        check_index("positions", prefix[b] + depth(b, t), 0, positions - 1);
      }
    }
  }
};

Dtype floating_rows(const View& x) {
  if (x.dims != 2 || x.dtype > Dtype::kFloat16) {
    x.fail("must have 2 dimensions and be float32, bfloat16 or float16");
  }
  return x.dtype;
}

void embed(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<EmbedCall>();
  EmbedCall& p = *call;
  const View tokens = next.tensor("tokens"), weight = next.tensor("weight");
  const View out = next.tensor("out");
  p.dtype = floating_rows(weight);
  p.B = tokens.expect(Dtype::kInt64, {-1, -1}).shape[0], p.T = tokens.shape[1];
  p.vocabulary = weight.shape[0], p.H = weight.shape[1];
  out.expect(p.dtype, {p.B * p.T, p.H});
  p.tokens = tokens.as<int64_t>(), p.tokens_batch = tokens.stride[0];
  p.weight = weight.data, p.weight_row = weight.stride[0];
  p.out = out.data, p.out_row = out.stride[0];
  next.run(std::move(call));
}

void rms_norm(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<PlainCall<RmsNorm>>();
  RmsNorm& p = *call;
  const View x = next.tensor("x"), weight = next.tensor("weight");
  p.dtype = floating_rows(x);
  p.M = x.shape[0], p.H = x.shape[1];
  weight.expect_dense(p.dtype, p.H);
  p.eps = static_cast<float>(next.value<double>());
  const View out = next.tensor("out");
  out.expect(p.dtype, {p.M, p.H});
  p.x = x.data, p.x_row = x.stride[0], p.weight = weight.data;
  p.out = out.data, p.out_row = out.stride[0];
  next.run(std::move(call));
}

void rotate_heads(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<RotateCall>();
  RotateCall& p = *call;
  const View heads = next.tensor("heads");
  p.dtype = floating(heads);
  p.Hq = next.value<int64_t>();
  p.B = heads.shape[0], p.T = heads.shape[1], p.D = heads.shape[3];
  p.Hk = (heads.shape[2] - p.Hq) / 2;
  if (p.Hq < 0 || p.Hk < 0 || p.Hq + 2 * p.Hk != heads.shape[2]) {
    heads.fail("must be of queries, keys, values");
  }
  p.heads = heads.data;
  p.batch = heads.stride[0], p.row = heads.stride[1], p.head = heads.stride[2];
  const View q_norm = next.tensor("q_norm"), k_norm = next.tensor("k_norm");
  if (q_norm) p.q_norm = q_norm.expect_dense(p.dtype, p.D).data;
  if (k_norm) p.k_norm = k_norm.expect_dense(p.dtype, p.D).data;
  p.eps = static_cast<float>(next.value<double>());
  const View cos = next.tensor("cos"), sin = next.tensor("sin");
  p.positions = cos.expect(Dtype::kFloat32, {-1, -1}).shape[0], p.half = cos.shape[1];
  sin.expect(Dtype::kFloat32, {p.positions, p.half});
  if (2 * p.half > p.D) cos.fail("must turn at most a whole head");
  if (sin.stride[0] != cos.stride[0]) sin.fail("must have the strides of cos");
  p.cos = cos.as<float>(), p.sin = sin.as<float>(), p.table_row = cos.stride[0];
  p.prefix = next.tensor("prefix").expect_dense(Dtype::kInt32, p.B).as<int32_t>();
  const View depths = next.tensor("depths");
  if (depths) {
    depths.expect(Dtype::kInt32, {depths.shape[0] == 1 ? 1 : p.B, p.T});
    p.depths = depths.as<int32_t>(), p.depths_batch = depths.step(0);
  }
  const View k = next.tensor("k_cache"), v = next.tensor("v_cache");
  if (k) {
    p.capacity = k.expect(p.dtype, {p.B, -1, p.Hk, p.D}).shape[1];
    v.expect(p.dtype, {p.B, p.capacity, p.Hk, p.D});
    p.k_cache = k.rows(), p.v_cache = v.rows(), p.stores = true;
  }
  const auto first_slot = next.value<std::optional<int64_t>>();
  if (k && first_slot) check_index("first_slot", *first_slot, 0, p.capacity - p.T);
  p.first_slot = first_slot.value_or(-1);
  next.run(std::move(call));
}

// The rows of weights, and a bias that may be missing, of the type and depth of x.
Linear::Weights take_weights(const Linear& p, const View& weight, const View& bias) {
  weight.expect(p.dtype, {-1, p.K});
  const Linear::Weights weights = {weight.data, weight.shape[0], weight.stride[0], bias.data};
  if (bias) bias.expect_dense(p.dtype, weights.rows);
  return weights;
}

Activation activation_named(const std::optional<std::string>& name) {
  if (!name) return Activation::kNone;
  if (*name == "silu") return Activation::kSilu;
  if (*name == "gelu") return Activation::kGelu;
  if (*name == "gelu_tanh") return Activation::kGeluTanh;
  throw std::invalid_argument("activation must be silu, gelu or gelu_tanh, got " + *name);
}

// Sets the rows of a call that is not gated yet.
void set_rows(Linear& p, const View& x) {
  if (x.dtype > Dtype::kFloat16) x.fail("must be float32, bfloat16 or float16");
  x.expect(x.dtype, {-1, -1});
  p.dtype = x.dtype, p.M = x.shape[0], p.K = x.shape[1];
  p.x = x.data, p.x_row = x.stride[0];
}

// Takes residual and out.
void take_sum(Linear& p, Arguments& next) {
  const View residual = next.tensor("residual"), out = next.tensor("out");
  p.out_float = out.dtype == Dtype::kFloat32;
  const Dtype type = p.out_float ? Dtype::kFloat32 : p.dtype;
  out.expect(type, {p.M, p.columns()});
  p.out = out.data, p.out_row = out.stride[0];
  if (!residual) return;
  residual.expect(type, {p.M, p.columns()});
  p.residual = residual.data, p.residual_row = residual.stride[0];
}

void linear_few_rows(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<PlainCall<Linear>>();
  Linear& p = *call;
  set_rows(p, next.tensor("x"));
  const View weight = next.tensor("weight"), bias = next.tensor("bias");
  const View up = next.tensor("up");
  p.parts[0] = take_weights(p, weight, bias);
  if (up) {
    p.gated = true, p.num_parts = 2;
    p.parts[1] =
        take_weights(p, up.expect(p.dtype, {p.parts[0].rows, p.K}), {"no bias", py::none()});
  }
  p.activation = activation_named(next.value<std::optional<std::string>>());
  take_sum(p, next);
  next.run(std::move(call));
}

// Up to three layers of the same x, whose outputs stand behind one another; or with a gate, an
// activation, of the first times the second.
void linear_parts(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<PlainCall<Linear>>();
  Linear& p = *call;
  set_rows(p, next.tensor("x"));
  const auto weights = next.value<std::vector<py::object>>();
  const auto biases = next.value<std::vector<py::object>>();
  const auto gate = next.value<std::optional<std::string>>();
  if (weights.empty() || weights.size() > std::size(p.parts) || biases.size() != weights.size()) {
    throw std::invalid_argument("weights must be one to three tensors, with a bias or None each");
  }
  p.num_parts = static_cast<int>(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    p.parts[i] = take_weights(p, {"weights", weights[i]}, {"biases", biases[i]});
  }
  p.activation = activation_named(gate);
  p.gated = gate.has_value();
  if (p.gated && (p.num_parts != 2 || p.parts[0].rows != p.parts[1].rows)) {
    throw std::invalid_argument("weights must be two of one shape where there is a gate");
  }
  take_sum(p, next);
  next.run(std::move(call));
}

// Writes best_tokens, best_scores, best_parents and best_masks: parts of one tree's arrays.
void best_children(const py::args& all) {
  Arguments next(all);
  auto call = std::make_unique<PlainCall<BestChildren>>();
  BestChildren& p = *call;
  const View logits = next.tensor("logits"), scores = next.tensor("scores");
  const View masks = next.tensor("masks");
  p.first = next.value<int64_t>();
  const View tokens = next.tensor("best_tokens"), best = next.tensor("best_scores");
  const View parents = next.tensor("best_parents"), best_masks = next.tensor("best_masks");
  if (logits.dims != 3 || logits.dtype > Dtype::kFloat16) {
    logits.fail("must have 3 dimensions and be float32, bfloat16 or float16");
  }
  p.dtype = logits.dtype;
  p.B = logits.shape[0], p.nodes = logits.shape[1], p.vocabulary = logits.shape[2];
  p.width = tokens.expect(Dtype::kInt64, {p.B, -1}).shape[1];
  scores.expect(Dtype::kFloat32, {p.B, p.nodes});
  p.words = masks.expect(Dtype::kInt64, {p.B, p.nodes, -1}).shape[2];
  best.expect(Dtype::kFloat32, {p.B, p.width});
  parents.expect(Dtype::kInt64, {p.B, p.width});
  best_masks.expect(Dtype::kInt64, {p.B, p.width, p.words});
  if (p.width < 1 || p.width > p.nodes * p.vocabulary) {
    tokens.fail("must be at least one, and at most as many as there are");
  }
  check_index("first", p.first, 0, 64 * p.words - p.nodes - p.width);
  if (best.stride[0] != tokens.stride[0] || parents.stride[0] != tokens.stride[0] ||
      masks.stride[1] != p.words || best_masks.stride[1] != p.words) {
    tokens.fail("must be laid out as best_scores and best_parents, and masks densely");
  }
  p.logits = logits.data, p.logits_batch = logits.stride[0], p.logits_row = logits.stride[1];
  p.scores = scores.as<float>(), p.scores_batch = scores.stride[0];
  p.masks = masks.as<int64_t>(), p.masks_batch = masks.stride[0];
  p.best_tokens = tokens.as<int64_t>(), p.best_batch = tokens.stride[0];
  p.best_scores = best.as<float>(), p.best_parents = parents.as<int64_t>();
  p.best_masks = best_masks.as<int64_t>(), p.best_masks_batch = best_masks.stride[0];
  next.run(std::move(call));
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "Attention primitives for the CPU, with the arguments of their torch operators.";
  torch_names.load();
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
  m.def("tree_attention", &tree_attention);
  m.def("hybrid_tree_attention", &hybrid_tree_attention);
  m.def("verify_attention", &verify_attention);
  m.def("sparse_gather_attention", &sparse_gather_attention);
  m.def("importance_scores", &importance_scores);
  m.def("select_topk", &select_topk);
  m.def("merge_state", &merge_state);
  m.def("merge_states", &merge_states);
  m.def("best_children", &best_children);
  m.def("embed", &embed);
  m.def("rms_norm", &rms_norm);
  m.def("rotate_heads", &rotate_heads);
  py::class_<PyGraph>(m, "Graph",
                      "Kernel calls, recorded while they run, that run again in one go: `with "
                      "graph: ...`, then `graph.replay(threads)`.")
      .def(py::init<>())
      .def("__enter__", &PyGraph::begin)
      .def("__exit__", &PyGraph::end)
      .def("__len__", &PyGraph::size)
      .def("replay", &PyGraph::replay, py::arg("threads"));
  m.def("linear_few_rows", &linear_few_rows);
  m.def("linear_parts", &linear_parts,
        "linear_few_rows of up to three weights side by side: "
        "x, weights, biases, gate, residual, out.");
}
