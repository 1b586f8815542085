// A path of a tree becomes part of a head's state (reference/gated_delta_commit.py has the
// equation).
#pragma once

#include <algorithm>

#include "denormals.h"
#include "recurrent.h"

namespace specattn {

// S <- (product of all decays) S + sum over the path of (its key, decayed by what is behind) d^T.
template <class Isa>
void gated_delta_commit(const GatedDeltaCommit& p, int64_t head, int64_t next, float* scratch) {
  using V = typename Isa::V;
  constexpr int W = Isa::W, kRows = 4, kColumns = Isa::kScoreAccumulators >= 24 ? 4 : 2;
  [[maybe_unused]] const FlushToZero flush;
  const int64_t b = head / p.Hv, h = head % p.Hv, count = p.path.count(b);
  AheadLines ahead(p.state, p.Hv, next, p.Dk, p.Dv);
  // Rows of the stash begin anywhere in a cache line: updates, which are read often, are copied.
  float* const updates = scratch;              // [count][Dv]
  float* const keys = updates + count * p.Dv;  // [count][Dk]
  float* const behind = keys + count * p.Dk;   // [Dk]
  std::fill_n(behind, p.Dk, 1.0f);
  for (int64_t n = count - 1; n >= 0; --n) {
    const float* const kept = p.stash.at<float>(p.tree, b, p.path.node(b, n), h);
    const float* const decay = kept + p.Dk + p.Dv;
    std::copy_n(kept + p.Dk, p.Dv, updates + n * p.Dv);
    for (int64_t c = 0; c < p.Dk; ++c) {
      keys[n * p.Dk + c] = kept[c] * behind[c];
      behind[c] *= decay[p.decays == 1 ? 0 : c];
    }
  }
  float* const state = p.state.at(b, h);
  const int64_t next_b = next / p.Hv, rows_ahead = next < 0 ? 0 : p.path.count(next_b);
  const int64_t row_bytes = (p.Dk + p.Dv + p.decays) * static_cast<int64_t>(sizeof(float));
  for (int64_t c = 0; c < p.Dk; c += kRows) {
    for (int64_t n = c / kRows; n < rows_ahead; n += p.Dk / kRows) {
      const int64_t node = p.path.node(next_b, n);
      fetch_lines(p.stash.at<float>(p.tree, next_b, node, next % p.Hv), row_bytes);
    }
    int64_t column = 0;
    for (; column + kColumns * W <= p.Dv; column += kColumns * W) {
      ahead.touch(std::max(1, kRows * kColumns * W / 16));
      V acc[kRows][kColumns];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V whole = Isa::set1(behind[c + r]);
#pragma GCC unroll 4
        for (int n = 0; n < kColumns; ++n) {
          acc[r][n] = Isa::mul(whole, Isa::load(state + (c + r) * p.state.row + column + n * W));
        }
      }
      for (int64_t j = 0; j < count; ++j) {
        const float* const key = keys + j * p.Dk + c;
        V u[kColumns];
#pragma GCC unroll 4
        for (int n = 0; n < kColumns; ++n) u[n] = Isa::load(updates + j * p.Dv + column + n * W);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const V factor = Isa::set1(key[r]);
#pragma GCC unroll 4
          for (int n = 0; n < kColumns; ++n) acc[r][n] = Isa::fma(factor, u[n], acc[r][n]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < kColumns; ++n) {
          Isa::store(state + (c + r) * p.state.row + column + n * W, acc[r][n]);
        }
      }
    }
    for (; column < p.Dv; ++column) {
      for (int r = 0; r < kRows; ++r) {
        float& s = state[(c + r) * p.state.row + column];
        s *= behind[c + r];
        for (int64_t j = 0; j < count; ++j)
          s += keys[j * p.Dk + c + r] * updates[j * p.Dv + column];
      }
    }
  }
}

}  // namespace specattn
