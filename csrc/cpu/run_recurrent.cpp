// Deals the heads and channels of layers with a state to threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "convert.h"
#include "kernels.h"
#include "recurrent.h"
#include "run.h"
#include "team.h"
#include "workspace.h"

namespace specattn {
namespace {

constexpr int64_t kHeadsOfRun = 8;  // at most: whose rows are neighbours in memory
constexpr int64_t kChannels = 256;  // of a piece of a convolution

// Deals heads to threads in runs of neighbours: what they share stays in one core's caches, and the
// head that a thread takes next is known, or probable at the end of a run.
template <class Work>
void for_heads(int threads, int64_t heads, const Work& work) {
  const int64_t run = std::clamp<int64_t>(heads / (threads * kTasksPerThread), 1, kHeadsOfRun);
  parallel(threads, ceil_div(heads, run), [&](int64_t i, int worker) {
    const int64_t end = std::min((i + 1) * run, heads), after = (i + threads) * run;
    for (int64_t head = i * run; head < end; ++head) {
      const int64_t next = head + 1 < end ? head + 1 : after;
      work(head, next < heads ? next : -1, worker);
    }
  });
}

template <class Elem>
void gates_of_row(const DeltaGates& p, int64_t i) {
  const Elem* const b = static_cast<const Elem*>(p.b) + i * p.b_row;
  const Elem* const a = static_cast<const Elem*>(p.a) + i * p.a_row;
  for (int64_t h = 0; h < p.heads; ++h) {
    const float x = to_float(a[h]) + p.bias[h];
    const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
    p.g[i * p.g_row + h] = p.rate[h] * softplus;
    p.beta[i * p.beta_row + h] = p.most / (1.0f + std::exp(-to_float(b[h])));
  }
}

}  // namespace

void run(const DeltaGates& p, int threads) {
  threads = useful_threads(100 * p.M * p.heads, p.M, threads);
  parallel(threads, p.M, [&](int64_t i, int) {
    if (p.dtype == Dtype::kFloat32) return gates_of_row<float>(p, i);
    if (p.dtype == Dtype::kBFloat16) return gates_of_row<bf16>(p, i);
    return gates_of_row<fp16>(p, i);
  });
}

void run(const GatedDelta& p, int threads) {
  static thread_local Arena arena;
  const int64_t pieces = p.tree.B * p.Hv, scratch = GatedDeltaScratch::floats(p);
  threads = useful_threads(pieces * p.Dk * p.Dv * (4 + p.tree.T), pieces, threads);
  float* const memory = arena.floats(threads * scratch);
  const auto head = chosen_kernels().gated_delta[static_cast<int>(p.dtype)];
  for_heads(threads, pieces, [&](int64_t i, int64_t next, int worker) {
    head(p, i, next, memory + worker * scratch);
  });
}

void run(const GatedDeltaCommit& p, int threads) {
  static thread_local Arena arena;
  const int64_t pieces = p.tree.B * p.Hv;
  int64_t most = 0;
  for (int64_t b = 0; b < p.tree.B; ++b) most = std::max(most, p.path.count(b));
  const int64_t scratch = round_up(most * (p.Dk + p.Dv) + p.Dk, 16);
  threads = useful_threads(pieces * p.Dk * p.Dv * (8 + most), pieces, threads);
  float* const memory = arena.floats(threads * scratch);
  const auto commit = chosen_kernels().gated_delta_commit;
  for_heads(threads, pieces, [&](int64_t i, int64_t next, int worker) {
    if (p.path.count(i / p.Hv) == 0) return;
    commit(p, i, next, memory + worker * scratch);
  });
}

void run(const CausalConv& p, int threads) {
  const int64_t each = ceil_div(p.C, kChannels), pieces = p.tree.B * each;
  threads = useful_threads(p.tree.B * p.C * (p.tree.T + 4) * p.K, pieces, threads);
  const auto conv = chosen_kernels().causal_conv[static_cast<int>(p.dtype)];
  parallel(threads, pieces, [&](int64_t i, int) {
    const int64_t first = i % each * kChannels;
    conv(p, i / each, first, std::min(first + kChannels, p.C));
  });
}

// Rows only move towards the older end, so the oldest goes first.
void run(const CausalConvCommit& p, int) {
  const int64_t size = size_of(p.dtype), kept = p.K - 1;
  for (int64_t b = 0; b < p.tree.B; ++b) {
    const int64_t count = p.path.count(b);
    char* const state = static_cast<char*>(p.kept) + b * p.kept_batch * size;
    for (int64_t r = 0; r < kept && count > 0; ++r) {
      const int64_t from = r + count;  // among what was kept and then the path
      const char* row = state + from * p.kept_row * size;
      if (from >= kept) {
        const int64_t i = p.path.node(b, from - kept);
        row = static_cast<const char*>(p.x.data) +
              (b * p.x.batch + (p.tree.first(b) + i) * p.x.row) * size;
      }
      std::memcpy(state + r * p.kept_row * size, row, static_cast<size_t>(p.C * size));
    }
  }
}

}  // namespace specattn
