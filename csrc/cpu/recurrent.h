// Layers that keep a state instead of keys: the gated delta rule, and the short convolution in
// front of it. A call verifies the rows of a tree and only reads the state; a commit advances it.
#pragma once

#include "linear.h"
#include "types.h"

namespace specattn {

constexpr int64_t kMostNodes = 128;    // rows of a request
constexpr int64_t kMaxStateDim = 256;  // multiples of 8 up to here
constexpr int64_t kMostTaps = 8;       // of a convolution, with the row itself

// The rows of all requests, and which follows which.
struct TreeRows {
  int64_t B = 0, T = 0;              // T: of each request; of ragged ones the most
  int64_t tokens = 0;                // ragged rows in all
  const int32_t* starts = nullptr;   // ragged where given, [B + 1]
  const int64_t* parents = nullptr;  // [B or 1, T] or [tokens], -1 behind the state; null: chains
  int64_t parents_batch = 0;

  int64_t first(int64_t b) const { return starts ? starts[b] : 0; }
  int64_t rows(int64_t b) const { return starts ? starts[b + 1] - starts[b] : T; }
  int64_t parent(int64_t b, int64_t i) const {
    return parents ? parents[b * parents_batch + first(b) + i] : i - 1;
  }
};

// [B, T, heads, ..], or ragged [tokens, heads, ..] with no step from request to request.
struct RowsOfHeads {
  const void* data = nullptr;
  int64_t batch = 0, row = 0, head = 0;

  template <class T>
  const T* at(const TreeRows& tree, int64_t b, int64_t i, int64_t h = 0) const {
    return static_cast<const T*>(data) + b * batch + (tree.first(b) + i) * row + h * head;
  }
  template <class T>
  T* out(const TreeRows& tree, int64_t b, int64_t i, int64_t h = 0) const {
    return const_cast<T*>(at<T>(tree, b, i, h));
  }
};

// States [B, heads, Dk, Dv], rows of Dv.
struct States {
  float* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;

  float* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct GatedDelta {
  Dtype dtype = Dtype::kFloat32;  // of q, k, v and out
  TreeRows tree;
  int64_t Hk = 0, Hv = 0, Dk = 0, Dv = 0;
  RowsOfHeads q, k, v, g, beta;
  int64_t decays = 1;  // of a row and head: 1, or Dk
  float scale = 1;
  bool l2_norm = false;
  States state;
  RowsOfHeads out, stash;  // of a row: its key, its update d, exp(g)
};

// The rows of each request, from a root downwards, that become part of its state.
struct Path {
  const int64_t* nodes = nullptr;  // [B, P]; null: the first rows
  int64_t nodes_batch = 0, P = 0;
  const int64_t* counts = nullptr;  // [B]
  int64_t counts_step = 1;

  int64_t count(int64_t b) const { return counts[b * counts_step]; }
  int64_t node(int64_t b, int64_t i) const { return nodes ? nodes[b * nodes_batch + i] : i; }
};

struct GatedDeltaCommit {
  TreeRows tree;
  Path path;
  int64_t Hv = 0, Dk = 0, Dv = 0, decays = 1;
  States state;
  RowsOfHeads stash;
};

struct CausalConv {
  Dtype dtype = Dtype::kFloat32;
  TreeRows tree;
  int64_t C = 0, K = 0;
  RowsOfHeads x, out;
  const void *weight = nullptr, *bias = nullptr;  // [C, K], [C] or null
  int64_t weight_row = 0;
  const void* kept = nullptr;  // [B, K - 1, C], the newest last
  int64_t kept_batch = 0, kept_row = 0;
  Activation activation = Activation::kNone;
};

struct CausalConvCommit {
  Dtype dtype = Dtype::kFloat32;
  TreeRows tree;
  Path path;
  int64_t C = 0, K = 0;
  RowsOfHeads x;
  void* kept = nullptr;
  int64_t kept_batch = 0, kept_row = 0;
};

// Fetches whatever lies there into the L2 cache.
inline void fetch_lines(const void* at, int64_t bytes) {
  const char* const first = static_cast<const char*>(at);
  for (int64_t i = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) % 64); i < bytes;
       i += 64) {
    __builtin_prefetch(first + i, 0, 2);
  }
  asm volatile("");  // GCC leaves out calls of a function that does nothing but prefetch
}

// Cache lines that come next, fetched a few at a time beside the work on what came before.
class AheadLines {
 public:
  // The state of a head; `next` is its number among those of all requests, or negative for none.
  AheadLines(const States& states, int64_t heads, int64_t next, int64_t Dk, int64_t Dv) {
    if (next < 0 || states.row != Dv) return;
    at_ = states.at(next / heads, next % heads), end_ = at_ + Dk * Dv;
  }

  void touch(int lines) {
    for (int i = 0; i < lines && at_ < end_; ++i, at_ += 16) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const float *at_ = nullptr, *end_ = nullptr;
};

// What a thread needs for the rows of one head.
struct GatedDeltaScratch {
  float *k, *q;      // [T][Dk], normalised, q scaled
  float* since;      // [T][decays]: the product of exp(g) along a row's path
  float* x;          // what meets the state: all keys, then all queries, in blocks [Dk][rows]
  float *d, *known;  // [T][Dv] each, one behind the other: S^T k, later d; S^T q
  float* fading;     // [Dk]

  static int64_t floats(const GatedDelta& p) {
    const int64_t T = p.tree.T;
    return round_up(T * (4 * p.Dk + p.decays + 2 * p.Dv) + p.Dk, 16);
  }
  GatedDeltaScratch(float* at, const GatedDelta& p) {
    const int64_t T = p.tree.T;
    k = at, q = k + T * p.Dk, x = q + T * p.Dk, d = x + 2 * T * p.Dk;
    known = nullptr;  // behind the rows that there are
    since = d + 2 * T * p.Dv;
    fading = since + T * p.decays;
  }
};

// g = rate softplus(a + bias) and beta = most sigmoid(b), of rows of `heads` products each.
struct DeltaGates {
  Dtype dtype = Dtype::kFloat32;  // of b and a
  int64_t M = 0, heads = 0;
  const void *b = nullptr, *a = nullptr;
  int64_t b_row = 0, a_row = 0;
  const float *rate = nullptr, *bias = nullptr;
  float most = 1;
  float *g = nullptr, *beta = nullptr;
  int64_t g_row = 0, beta_row = 0;
};

void run(const DeltaGates&, int threads);
void run(const GatedDelta&, int threads);
void run(const GatedDeltaCommit&, int threads);
void run(const CausalConv&, int threads);
void run(const CausalConvCommit&, int threads);

}  // namespace specattn
