// Products of many rows of x by panels: the weights of some outputs, copied so that lanes are
// outputs and a lane holds two neighbours along K, stay in the L2 cache while all rows meet them.
//
// An element is one sum in the order of K, whatever rows are multiplied beside it.
#pragma once

#include "linear_finish.h"

namespace specattn {

template <class Isa, class Elem>
struct Panels {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  static_assert(Dot::kPair == 2 && sizeof(Elem) == 2);
  static constexpr int W = Isa::W, kVectors = kMostColumns / W;
  using Sums = float[kPanelRows][kMostColumns];

  // Weights `to` [pair along K][output], outputs to whole vectors; what does not exist is zero.
  static void pack(const Elem* w, int64_t stride, int outputs, int64_t depth, float* to) {
    const int64_t row = round_up(outputs, W);
    for (int first = 0; first < outputs; first += W) {
      const Elem* const from = w + first * stride;
      const bool whole = outputs - first >= W && stride % 2 == 0;
      int64_t k = 0;
      for (; whole && k + 8 <= depth; k += 8) {
        V four[4];
        Isa::load_four_rows(reinterpret_cast<const float*>(from + k), static_cast<int>(stride / 2),
                            four);
        for (int i = 0; i < 4; ++i) Isa::store(to + (k / 2 + i) * row + first, four[i]);
      }
      for (; k < depth; k += 2) {
        for (int i = 0; i < W; ++i) {
          float pair = 0;
          if (first + i < outputs) std::memcpy(&pair, from + i * stride + k, sizeof pair);
          to[k / 2 * row + first + i] = pair;
        }
      }
    }
  }

  // Adds to sums, or makes them, the products of rows of x with a panel of so many vectors.
  template <int vectors>
  static void multiply(const Elem* const (&x)[kPanelRows], const float* panel, int64_t depth,
                       bool more, Sums& sums) {
    V acc[kPanelRows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) {
        acc[r][j] = more ? Isa::load(sums[r] + j * W) : Isa::zero();
      }
    for (int64_t k = 0; k < depth; k += 2, panel += vectors * W) {
      V w[vectors];
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) w[j] = Isa::load(panel + j * W);
#pragma GCC unroll 8
      for (int r = 0; r < kPanelRows; ++r) {
        V pair = Isa::broadcast(x[r] + k);
        asm("" : "+v"(pair));  // else each product loads it again: on Zen 5 a sixth slower
#pragma GCC unroll 4
        for (int j = 0; j < vectors; ++j) acc[r][j] = Dot::dot(acc[r][j], w[j], pair);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) Isa::store(sums[r] + j * W, acc[r][j]);
  }

  static void multiply(int outputs, const Elem* const (&x)[kPanelRows], const float* panel,
                       int64_t depth, bool more, Sums& sums) {
    static_assert(kVectors == 3);
    if (outputs > 2 * W) return multiply<3>(x, panel, depth, more, sums);
    if (outputs > W) return multiply<2>(x, panel, depth, more, sums);
    multiply<1>(x, panel, depth, more, sums);
  }

  // Rows of weights that a piece reads of a part, from k on.
  static const Elem* weights(const Linear& p, int part, int64_t first, int64_t k) {
    return static_cast<const Elem*>(p.parts[part].data) + first * p.parts[part].stride + k;
  }

  // Some rows of the weights that are packed next, as many at each of `steps` steps.
  static void look_ahead(const Linear& p, const LinearPiece& piece, int parts, int64_t k,
                         int64_t depth, int64_t step, int64_t steps) {
    const bool ends = k + depth >= p.K;
    const int64_t from = ends ? 0 : k + depth, first = ends ? piece.next : piece.first;
    const int64_t length = std::min(tuning.panel_depth, p.K - from);
    for (int part = piece.part; part < piece.part + parts; ++part) {
      const int64_t count = std::min<int64_t>(piece.count, p.parts[part].rows - first);
      for (int64_t n = count * step / steps; n < count * (step + 1) / steps; ++n) {
        const char* const row = reinterpret_cast<const char*>(weights(p, part, first + n, from));
        for (int64_t at = 0; at < 2 * length; at += 64) __builtin_prefetch(row + at, 0, 2);
      }
    }
  }
};

template <class Isa, class Elem>
void multiply_panel(const Linear& p, float* memory, const LinearPiece& piece) {
  using Panels = specattn::Panels<Isa, Elem>;
  using Sums = typename Panels::Sums;
  const int parts = p.gated ? 2 : 1;
  const int64_t steps = ceil_div(p.M, kPanelRows);
  float* panels[2] = {memory, memory + kMostColumns * std::min(tuning.panel_depth, p.K) / 2};
  Sums* const kept = reinterpret_cast<Sums*>(memory + parts * kMostColumns *
                                                          std::min(tuning.panel_depth, p.K) / 2);
  const auto finish = p.out_float ? finish_row<Isa, Elem, float> : finish_row<Isa, Elem, Elem>;
  for (int64_t k = 0; k < p.K; k += tuning.panel_depth) {
    const int64_t depth = std::min(tuning.panel_depth, p.K - k);
    for (int i = 0; i < parts; ++i) {
      const int part = piece.part + i;
      Panels::pack(Panels::weights(p, part, piece.first, k), p.parts[part].stride, piece.count,
                   depth, panels[i]);
    }
    for (int64_t step = 0; step < steps; ++step) {
      Panels::look_ahead(p, piece, parts, k, depth, step, steps);
      const int64_t row = step * kPanelRows;
      const Elem* x[kPanelRows];
      for (int r = 0; r < kPanelRows; ++r) {
        x[r] = static_cast<const Elem*>(p.x) + std::min(row + r, p.M - 1) * p.x_row + k;
      }
      Sums* const sums = kept + (p.K > tuning.panel_depth ? step * parts : 0);
      for (int i = 0; i < parts; ++i) {
        Panels::multiply(piece.count, x, panels[i], depth, k > 0, sums[i]);
      }
      if (k + depth < p.K) continue;
      for (int r = 0; r < std::min<int64_t>(kPanelRows, p.M - row); ++r) {
        finish(p, piece.part, row + r, piece.first, piece.column, piece.count, sums[0][r],
               sums[parts - 1][r]);
      }
    }
  }
}

}  // namespace specattn
