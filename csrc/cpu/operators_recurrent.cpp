// layers that keep a state instead of keys.
#include "operators.h"
#include "check.h"
#include "recurrent.h"

using namespace specattn;

namespace {

void check_tree(const TreeRows& tree) {
  if (tree.starts) check_rows(tree.starts, tree.B, tree.tokens, tree.T);
  if (!tree.parents) return;
  for (int64_t b = 0; b < tree.B; ++b) {
    for (int64_t i = 0; i < tree.rows(b); ++i) {
      check_index("parents", tree.parent(b, i), -1, i - 1);
    }
  }
}

void check_path(const TreeRows& tree, const Path& path) {
  if (tree.starts) check_rows(tree.starts, tree.B, tree.tokens, tree.T);
  for (int64_t b = 0; b < tree.B; ++b) {
    const int64_t rows = tree.rows(b);
    check_index("counts", path.count(b), 0, path.nodes ? std::min(rows, path.P) : rows);
    for (int64_t i = 0; i < path.count(b); ++i) {
      check_index("nodes", path.node(b, i), 0, rows - 1);
    }
  }
}

struct GatedDeltaCall : PlainCall<GatedDelta> {
  void check() const override { check_tree(tree); }
};
struct GatedDeltaCommitCall : PlainCall<GatedDeltaCommit> {
  void check() const override { check_path(tree, path); }
};
struct CausalConvCall : PlainCall<CausalConv> {
  void check() const override { check_tree(tree); }
};
struct CausalConvCommitCall : PlainCall<CausalConvCommit> {
  void check() const override { check_path(tree, path); }
};

// The rows that `x` has in front of `inner` dimensions, ragged where `starts` is given.
void set_tree(TreeRows& tree, const View& x, int inner, const View& starts,
              std::optional<int64_t> most) {
  if (x.dims != inner + (starts ? 1 : 2)) x.fail("has a wrong number of dimensions");
  if (starts) {
    starts.expect_dense(Dtype::kInt32, starts.shape[0]);
    if (!most || *most < 1) starts.fail("needs max_seqlen_q, at least 1");
    tree.B = starts.shape[0] - 1, tree.T = *most, tree.tokens = x.shape[0];
    tree.starts = starts.as<int32_t>();
  } else {
    tree.B = x.shape[0], tree.T = x.shape[1];
  }
  if (tree.T > kMostNodes) x.fail("must have at most 128 rows per request");
}

void set_parents(TreeRows& tree, const View& parents) {
  if (!parents) return;
  if (tree.starts) {
    parents.expect_dense(Dtype::kInt64, tree.tokens);
  } else {
    parents.expect(Dtype::kInt64, {parents.shape[0] == 1 ? 1 : tree.B, tree.T});
    tree.parents_batch = parents.step(0);
  }
  tree.parents = parents.as<int64_t>();
}

Path path_of(const TreeRows& tree, const View& nodes, const View& counts) {
  Path path;
  if (nodes) {
    nodes.expect(Dtype::kInt64, {tree.B, -1});
    path.nodes = nodes.as<int64_t>(), path.nodes_batch = nodes.stride[0], path.P = nodes.shape[1];
  }
  counts.expect(Dtype::kInt64, {tree.B});
  path.counts = counts.as<int64_t>(), path.counts_step = counts.stride[0];
  return path;
}

// Rows of heads; `sizes` are those of a row.
RowsOfHeads rows_of(const TreeRows& tree, const View& x, Dtype type,
                    std::initializer_list<int64_t> sizes) {
  const int skip = tree.starts ? 1 : 2;
  bool same = x.present() && x.dtype == type && x.dims == skip + static_cast<int>(sizes.size());
  same = same &&
         (tree.starts ? x.shape[0] == tree.tokens : x.shape[0] == tree.B && x.shape[1] == tree.T);
  int i = skip;
  for (const int64_t size : sizes) same = same && size == x.shape[i++];
  if (!same) x.fail("must have the rows of the call, of the right sizes and type");
  RowsOfHeads rows;
  rows.data = x.data;
  rows.batch = tree.starts ? 0 : x.stride[0], rows.row = x.stride[skip - 1];
  rows.head = sizes.size() > 1 ? x.stride[skip] : 0;
  return rows;
}

Dtype computed(const View& x) {
  if (x.dtype > Dtype::kFloat16) x.fail("must be float32, bfloat16 or float16");
  return x.dtype;
}

States states_of(const View& state, int64_t B, int64_t Hv) {
  state.expect(Dtype::kFloat32, {B, Hv, -1, -1});
  const int64_t Dk = state.shape[2], Dv = state.shape[3];
  if (Dk % 8 || Dv % 8 || Dk > kMaxStateDim || Dv > kMaxStateDim || Dk == 0 || Dv == 0) {
    state.fail("must have sizes that are multiples of 8 up to 256");
  }
  return {state.as<float>(), state.stride[0], state.stride[1], state.stride[2]};
}

Made delta_gates(Arguments& next) {
  auto call = std::make_unique<PlainCall<DeltaGates>>();
  DeltaGates& p = *call;
  const View b = next.tensor("b"), a = next.tensor("a");
  p.dtype = computed(b.expect(b.dtype, {-1, -1}));
  p.M = b.shape[0], p.heads = b.shape[1];
  a.expect(p.dtype, {p.M, p.heads});
  p.b = b.data, p.b_row = b.stride[0], p.a = a.data, p.a_row = a.stride[0];
  p.rate = next.tensor("rate").expect_dense(Dtype::kFloat32, p.heads).as<float>();
  p.bias = next.tensor("bias").expect_dense(Dtype::kFloat32, p.heads).as<float>();
  p.most = static_cast<float>(next.value<double>());
  const View g = next.tensor("g"), beta = next.tensor("beta");
  p.g = g.expect(Dtype::kFloat32, {p.M, p.heads}).as<float>(), p.g_row = g.stride[0];
  p.beta = beta.expect(Dtype::kFloat32, {p.M, p.heads}).as<float>(), p.beta_row = beta.stride[0];
  return call;
}

Made gated_delta_tree(Arguments& next) {
  auto call = std::make_unique<GatedDeltaCall>();
  GatedDelta& p = *call;
  const View q = next.tensor("q"), k = next.tensor("k"), v = next.tensor("v");
  const View g = next.tensor("g"), beta = next.tensor("beta"), state = next.tensor("state");
  const View parents = next.tensor("parents");
  p.scale = static_cast<float>(next.value<double>());
  p.l2_norm = next.value<bool>();
  const View starts = next.tensor("cu_seqlens_q");
  set_tree(p.tree, q, 2, starts, next.value<std::optional<int64_t>>());
  set_parents(p.tree, parents);
  p.dtype = computed(q);
  p.Hk = q.shape[q.dims - 2], p.Dk = q.shape[q.dims - 1];
  p.Hv = v.present() && v.dims == q.dims ? v.shape[v.dims - 2] : 0;
  p.state = states_of(state, p.tree.B, p.Hv);
  p.Dv = state.shape[3];
  if (state.shape[2] != p.Dk) state.fail("must have the head_dim of q");
  if (p.Hk == 0 || p.Hv % p.Hk) v.fail("must have a multiple of the heads of q");
  p.q = rows_of(p.tree, q, p.dtype, {p.Hk, p.Dk});
  p.k = rows_of(p.tree, k, p.dtype, {p.Hk, p.Dk});
  p.v = rows_of(p.tree, v, p.dtype, {p.Hv, p.Dv});
  p.beta = rows_of(p.tree, beta, Dtype::kFloat32, {p.Hv});
  if (g.dims == q.dims) {
    p.decays = p.Dk;
    p.g = rows_of(p.tree, g, Dtype::kFloat32, {p.Hv, p.Dk});
  } else {
    p.g = rows_of(p.tree, g, Dtype::kFloat32, {p.Hv});
  }
  p.out = rows_of(p.tree, next.tensor("out"), p.dtype, {p.Hv, p.Dv});
  const int64_t width = p.Dk + p.Dv + p.decays;
  p.stash = rows_of(p.tree, next.tensor("stash"), Dtype::kFloat32, {p.Hv, width});
  return call;
}

Made gated_delta_commit(Arguments& next) {
  auto call = std::make_unique<GatedDeltaCommitCall>();
  GatedDeltaCommit& p = *call;
  const View state = next.tensor("state"), stash = next.tensor("stash");
  const View nodes = next.tensor("nodes"), counts = next.tensor("counts");
  const View starts = next.tensor("cu_seqlens_q");
  set_tree(p.tree, stash, 2, starts, next.value<std::optional<int64_t>>());
  p.path = path_of(p.tree, nodes, counts);
  p.Hv = stash.shape[stash.dims - 2];
  p.state = states_of(state, p.tree.B, p.Hv);
  p.Dk = state.shape[2], p.Dv = state.shape[3];
  const int64_t width = stash.shape[stash.dims - 1];
  p.decays = width - p.Dk - p.Dv;
  if (p.decays != 1 && p.decays != p.Dk) stash.fail("must be keys, updates and decays");
  p.stash = rows_of(p.tree, stash, Dtype::kFloat32, {p.Hv, width});
  return call;
}

Made causal_conv_tree(Arguments& next) {
  auto call = std::make_unique<CausalConvCall>();
  CausalConv& p = *call;
  const View x = next.tensor("x"), weight = next.tensor("weight"), bias = next.tensor("bias");
  const View kept = next.tensor("conv_state"), parents = next.tensor("parents");
  const auto activation = next.value<std::optional<std::string>>();
  if (activation && *activation != "silu") throw std::invalid_argument("activation must be silu");
  p.activation = activation ? Activation::kSilu : Activation::kNone;
  const View starts = next.tensor("cu_seqlens_q");
  set_tree(p.tree, x, 1, starts, next.value<std::optional<int64_t>>());
  set_parents(p.tree, parents);
  p.dtype = computed(x);
  p.C = x.shape[x.dims - 1];
  p.K = weight.expect(p.dtype, {p.C, -1}).shape[1];
  if (p.K < 2 || p.K > kMostTaps) weight.fail("must have 2 to 8 taps");
  p.weight = weight.data, p.weight_row = weight.stride[0];
  if (bias) p.bias = bias.expect_dense(p.dtype, p.C).data;
  kept.expect(p.dtype, {p.tree.B, p.K - 1, p.C});
  p.kept = kept.data, p.kept_batch = kept.stride[0], p.kept_row = kept.stride[1];
  p.x = rows_of(p.tree, x, p.dtype, {p.C});
  p.out = rows_of(p.tree, next.tensor("out"), p.dtype, {p.C});
  return call;
}

Made causal_conv_commit(Arguments& next) {
  auto call = std::make_unique<CausalConvCommitCall>();
  CausalConvCommit& p = *call;
  const View kept = next.tensor("conv_state"), x = next.tensor("x");
  const View nodes = next.tensor("nodes"), counts = next.tensor("counts");
  const View starts = next.tensor("cu_seqlens_q");
  set_tree(p.tree, x, 1, starts, next.value<std::optional<int64_t>>());
  p.path = path_of(p.tree, nodes, counts);
  p.dtype = computed(x);
  p.C = x.shape[x.dims - 1];
  p.K = kept.expect(p.dtype, {p.tree.B, -1, p.C}).shape[1] + 1;
  p.kept = kept.data, p.kept_batch = kept.stride[0], p.kept_row = kept.stride[1];
  p.x = rows_of(p.tree, x, p.dtype, {p.C});
  return call;
}

}  // namespace

std::vector<Operator> specattn::recurrent_operators() {
  return {
      {"delta_gates", &delta_gates,
       "most sigmoid(b) and rate softplus(a + bias): b, a, rate, bias, most, g, beta."},
      {"gated_delta_tree", &gated_delta_tree},
      {"gated_delta_commit", &gated_delta_commit},
      {"causal_conv_tree", &causal_conv_tree},
      {"causal_conv_commit", &causal_conv_commit},
  };
}
