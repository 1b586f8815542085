// Products of more packed rows of x than registers hold: a block of weights is widened once, into
// the L1 cache, for all of them. Sums are those of `FewRows`, bit for bit.
#pragma once

#include "linear_rows.h"

namespace specattn {

template <class Isa, class Elem>
struct ManyRows {
  using Few = FewRows<Isa, Elem>;
  using V = typename Isa::V;
  static constexpr int W = Isa::W, kBlockRows = 4;
  static constexpr int kBlockColumns = 6;  // rows of weights in a block, each of a chain's length
  static constexpr int64_t kBlocksAhead = 4;  // that are prefetched
  static constexpr int kMost = 64;            // rows of x
  // Neighbours begin in different banks of the L1 cache.
  static constexpr int64_t kColumnFloats = Few::kDepth + W;

  // sums[row][column] of `count` rows of weights, as FewRows::multiply has them, of M rows of x.
  static void multiply(const float* x, int64_t M, int64_t K, const Elem* w, int64_t stride,
                       int count, const Elem* next, float (*sums)[kMostColumns]) {
    alignas(64) float wide[kBlockColumns * kColumnFloats];
    alignas(64) float partial[kMostColumns * kMost * W];
    const int groups = static_cast<int>(ceil_div(count, kBlockColumns));
    const int64_t chains = ceil_div(K, Few::kDepth);
    const int64_t column_size = round_up(M, kBlockRows) * W;
    for (int64_t i = 0; i < groups * chains; ++i) {
      const int64_t group = i % groups, k = i / groups * Few::kDepth;
      const int64_t depth = std::min(Few::kDepth, K - k), steps = ceil_div(depth, W);
      for (int c = 0; c < kBlockColumns; ++c) {
        const int64_t column = std::min<int64_t>(group * kBlockColumns + c, count - 1);
        widen(w + column * stride + k, depth, wide + c * kColumnFloats);
      }
      Ahead ahead(w, next, stride, groups, chains, i + kBlocksAhead, M);
      float* const to = partial + group * kBlockColumns * column_size;
      const float* block = x;
      for (int64_t row = 0; row < M;) {
        const int rows = Few::rows_at_once(M - row);
        const float* const at = block + k * rows;
        float* const sum = to + row * W;
        const float* const coming = row + rows < M ? at + Few::packed(rows, K) : x + k * kBlockRows;
        if (rows == 4) add<4, 3>(at, coming, wide, steps, k > 0, sum, column_size, ahead);
        if (rows == 2) add<2, 6>(at, coming, wide, steps, k > 0, sum, column_size, ahead);
        if (rows == 1) add<1, 6>(at, coming, wide, steps, k > 0, sum, column_size, ahead);
        row += rows;
        block += Few::packed(rows, K);
      }
    }
    for (int64_t r = 0; r < M; ++r) {
      for (int c = 0; c < count; c += W) {
        V lanes[W];
        for (int i = 0; i < W; ++i) lanes[i] = Isa::load(partial + (c + i) * column_size + r * W);
        Isa::store(sums[r] + c, Isa::sum_each(lanes));
      }
    }
  }

 private:
  // What of a later block is to be prefetched beside each product of a tile.
  struct Ahead {
    static constexpr int kLines = Few::kDepth * sizeof(Elem) / kLine;  // of a row of a block
    const Elem* at;
    int64_t stride;
    int line = 0, each;

    Ahead(const Elem* w, const Elem* next, int64_t stride, int64_t groups, int64_t chains,
          int64_t block, int64_t M)
        : stride(stride) {
      int64_t chain = block / groups;
      if (chain >= chains) w = next, chain -= chains;
      at = w + block % groups * kBlockColumns * stride + chain * Few::kDepth;
      const int tiles = static_cast<int>(M / 4 * 2 + (M % 4 + 1) / 2);
      each = static_cast<int>(ceil_div(kLines * kBlockColumns, tiles));
    }
    void some() {
      for (int i = 0; i < each && line < kLines * kBlockColumns; ++i, ++line) {
        const Elem* row = at + line % kBlockColumns * stride;
        __builtin_prefetch(row + line / kBlockColumns * (kLine / sizeof(Elem)), 0, 2);
      }
    }
  };

  static void widen(const Elem* from, int64_t count, float* to) {
    int64_t k = 0;
    for (; k + W <= count; k += W) Isa::store(to + k, Isa::load_as_float(from + k));
    if (k < count) Isa::store(to + k, Few::load_some(from + k, count - k));
  }

  // Adds products of a chain to partial sums of rows, `column_size` floats from column to column.
  // `coming` is what will be read of x next.
  template <int rows, int columns>
  static void add(const float* x, const float* coming, const float* wide, int64_t steps, bool more,
                  float* partial, int64_t column_size, Ahead& ahead) {
    for (int first = 0; first < kBlockColumns; first += columns) {
      ahead.some();
      const float* w = wide + first * kColumnFloats;
      const float* row = x;
      V acc[rows][columns];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 6
        for (int c = 0; c < columns; ++c) acc[r][c] = Isa::zero();
      }
      for (int64_t step = 0; step < steps; ++step, w += W, row += rows * W) {
        if (rows == kBlockRows)
          __builtin_prefetch(coming), coming += rows * columns * W / kBlockColumns;
        V v[columns];
#pragma GCC unroll 6
        for (int c = 0; c < columns; ++c) v[c] = Isa::load(w + c * kColumnFloats);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          V one = Isa::load(row + r * W);
          Few::load_once(one);
#pragma GCC unroll 6
          for (int c = 0; c < columns; ++c) acc[r][c] = Isa::fma(v[c], one, acc[r][c]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 6
        for (int c = 0; c < columns; ++c) {
          float* to = partial + (first + c) * column_size + r * W;
          Isa::store(to, more ? Isa::add(Isa::load(to), acc[r][c]) : acc[r][c]);
        }
      }
    }
  }
};

}  // namespace specattn
