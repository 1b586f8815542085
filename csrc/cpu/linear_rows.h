// Products of a few packed rows of x with rows of weights, as they lie in memory.
//
// A sum is one vector of partial sums along K, whatever rows are multiplied beside it. Vectors of
// partial sums are kept until the lanes of a whole vector of outputs can be added together.
#pragma once

#include <algorithm>

#include "convert.h"
#include "kernels.h"
#include "linear.h"

namespace specattn {

constexpr size_t kLine = 64;       // bytes of a cache line
constexpr int kWeightStreams = 4;  // rows of weights side by side: a processor reads each ahead
constexpr int kChain = 32;         // vectors along K in one sum; sums of chains are added up

// Where all streams of weights are: at a chain of one of their rows. Rows take turns as long as the
// part of x that they are multiplied with stays in the L1 cache.
struct Place {
  const int rows;
  const int64_t K, part, chain;
  int row = 0;
  int64_t start = 0, k = 0;
  bool over = false;

  int64_t depth() const { return std::min({chain, start + part - k, K - k}); }
  void advance() {
    k += chain;
    if (k < std::min(start + part, K)) return;
    if (++row == rows) {
      row = 0;
      start += part;
      if (start >= K) start = 0, over = true;
    }
    k = start;
  }
};

// sums[row][column]: the lanes of partial[row][column] together, of columns up to a whole vector.
template <class Isa, int rows>
void sum_lanes(const float (*partial)[kMostColumns][Isa::W], int count,
               float (*sums)[kMostColumns]) {
  constexpr int W = Isa::W;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < count; c += W) {
      typename Isa::V lanes[W];
      for (int i = 0; i < W; ++i) lanes[i] = Isa::load(partial[r][c + i]);
      Isa::store(sums[r] + c, Isa::sum_each(lanes));
    }
  }
}

template <class Isa, class Elem>
struct FewRows {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  static constexpr int W = Isa::W, kStep = W * Dot::kPair;  // elements of a vector
  static constexpr int64_t kDepth = kChain * kStep;         // and of a chain

  struct Tiles {};  // what a thread sets up for a piece

  // Rows of x that are multiplied at once, of so many that are left: 1, 2, 4 or 8.
  static constexpr int rows_at_once(int64_t left) {
    constexpr int kMost = Isa::kScoreAccumulators >= 16 ? 8 : 4;
    int rows = 1;
    while (rows < left && rows < kMost) rows *= 2;
    return rows;
  }

  // Floats that packed rows take.
  static constexpr int64_t packed(int rows, int64_t K) { return rows * W * ceil_div(K, kStep); }

  static V load(const Elem* p) {
    if constexpr (Dot::kPair == 1) {
      return Isa::load_as_float(p);
    } else {
      return Isa::load(reinterpret_cast<const float*>(p));
    }
  }

  // The last elements of a row, and zeros.
  static V load_some(const Elem* p, int64_t count) {
    Elem some[kStep] = {};
    std::copy(p, p + count, some);
    return load(some);
  }

  // Per block of rows [vector along K][row][lane].
  static void pack(const Linear& p, float* to) {
    for (int64_t first = 0; first < p.M;) {
      const int rows = rows_at_once(p.M - first);
      for (int r = 0; r < rows; ++r) {
        const Elem* from = static_cast<const Elem*>(p.x) + (first + r) * p.x_row;
        float* at = to + r * W;
        for (int64_t k = 0; k < p.K; k += kStep, at += rows * W) {
          const int64_t count = first + r < p.M ? std::min<int64_t>(kStep, p.K - k) : 0;
          Isa::store(at, count == kStep ? load(from + k) : load_some(from + k, count));
        }
      }
      first += rows;
      to += packed(rows, p.K);
    }
  }

  // sums[row][column] of `count` rows of weights; columns are padded to a whole vector. `next` is
  // what will be read afterwards.
  template <int rows>
  static void multiply(const float* x, int64_t K, const Elem* w, int64_t stride, int count,
                       const Elem* next, float (*sums)[kMostColumns]) {
    constexpr int kColumns = std::min(Isa::kScoreAccumulators / rows, kWeightStreams);
    // Whole chains: what is multiplied in one go changes no sum.
    const int64_t chains = tuning.packed_bytes / (4 * rows * W * kChain);
    const int64_t part = std::max<int64_t>(chains, 1) * kDepth;
    alignas(64) float partial[rows][kMostColumns][W];
    const int each = static_cast<int>(ceil_div(count, kColumns));
    Place now{each, K, part, kDepth}, ahead = now;
    for (int64_t bytes = 0; bytes < tuning.stream_ahead && !ahead.over; ahead.advance()) {
      bytes += ahead.depth() * static_cast<int64_t>(sizeof(Elem));
    }
    for (; !now.over; now.advance(), ahead.advance()) {
      const Elem *at[kColumns], *far[kColumns];
      float* to[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * each + now.row;
        at[c] = w + std::min(column, count - 1) * stride + now.k;
        far[c] = (ahead.over ? next : w) + (c * each + ahead.row) * stride + ahead.k;
        to[c] = partial[0][column];
      }
      add<rows, kColumns>(x + now.k / kStep * rows * W, at, far, now.depth(), now.k > 0, to);
    }
    sum_lanes<Isa, rows>(partial, count, sums);
  }

 private:
  // Adds products over `depth` elements to partial sums, kMostColumns * W floats from row to row.
  template <int rows, int columns>
  static void add(const float* x, const Elem* const* w, const Elem* const* ahead, int64_t depth,
                  bool more, float* const* partial) {
    constexpr int kRow = kMostColumns * W;
    V acc[rows][columns];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) acc[r][c] = Isa::zero();
    }
    const auto step = [&](auto&& weight) {
      V v[columns];
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) v[c] = weight(w[c]);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        V row = Isa::load(x + r * W);
        load_once(row);
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) acc[r][c] = Dot::dot(acc[r][c], v[c], row);
      }
      x += rows * W;
    };
    int64_t k = 0;
    for (; k + kStep <= depth; k += kStep) {
      if (kStep * sizeof(Elem) >= kLine || k * sizeof(Elem) % kLine == 0) {
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) __builtin_prefetch(ahead[c] + k, 0, 2);
      }
      step([k](const Elem* row) { return load(row + k); });
    }
    if (k < depth) step([k, depth](const Elem* row) { return load_some(row + k, depth - k); });
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) {
        float* to = partial[c] + r * kRow;
        Isa::store(to, more ? Isa::add(Isa::load(to), acc[r][c]) : acc[r][c]);
      }
    }
  }

  // Keeps a compiler from loading a vector again for every product that takes it.
  static void load_once(V& v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#else
    static_cast<void>(v);
#endif
  }
};

}  // namespace specattn
