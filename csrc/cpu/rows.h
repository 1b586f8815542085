// The products of a few query rows (one token of a group of heads): lanes are neighbours along D,
// then keys, since rows would leave most of a vector empty.
#pragma once

#include "state.h"
#include "tile.h"
#include "types.h"

namespace specattn {

constexpr int kFewRows = 8;  // up to here this costs less than a tile of sixteen lanes

// Sums of W keys with one row; NU vectors of units in a key, or `vectors` of them when NU is 0.
template <class Isa, class Dot, int NU>
inline typename Isa::V row_logits(const float* q, const char* const* k, int vectors, int rest) {
  using V = typename Isa::V;
  V x[NU ? NU : 1], acc[Isa::W];
#pragma GCC unroll 8
  for (int u = 0; u < NU; ++u) x[u] = Isa::load(q + u * Isa::W);
#pragma GCC unroll 16
  for (int i = 0; i < Isa::W; ++i) {
    const float* key = reinterpret_cast<const float*>(k[i]);
    acc[i] = Isa::zero();
    if constexpr (NU > 0) {
#pragma GCC unroll 8
      for (int u = 0; u < NU; ++u) acc[i] = Dot::dot(acc[i], x[u], Isa::load(key + u * Isa::W));
    } else {
      for (int u = 0; u < vectors; ++u) {
        acc[i] = Dot::dot(acc[i], Isa::load(q + u * Isa::W), Isa::load(key + u * Isa::W));
      }
      if (rest > 0) {
        float tail[Isa::W] = {};
        std::memcpy(tail, key + vectors * Isa::W, 4 * static_cast<size_t>(rest));
        acc[i] = Dot::dot(acc[i], Isa::load(q + vectors * Isa::W), Isa::load(tail));
      }
    }
  }
  return Isa::sum_each(acc);
}

template <class Isa, class Dot, int NU>
__attribute__((noinline)) void score_rows_of(const float* q, int stride, int rows,
                                             const char* const* k, int keys, int units, float* s,
                                             Prefetch& next) {
  const int lines = kScoreLines * Isa::W / rows;
  for (int n = 0; n < keys; n += Isa::W) {
    for (int r = 0; r < rows; ++r) {
      next.template issue<Isa>(lines);
      const auto logits =
          row_logits<Isa, Dot, NU>(q + r * stride, k + n, units / Isa::W, units % Isa::W);
      Isa::store(s + r * kBlock + n, logits);
    }
  }
}

// s[row][key] = q[row] . k[key]; rows of q are padded with zeros to whole vectors.
template <class Isa, class Dot>
inline void score_rows(const float* q, int stride, int rows, const char* const* k, int keys,
                       int units, float* s, Prefetch& next) {
  auto step = score_rows_of<Isa, Dot, 0>;
  if (units == 2 * Isa::W) step = score_rows_of<Isa, Dot, 2>;
  if (units == 4 * Isa::W) step = score_rows_of<Isa, Dot, 4>;
  if (units == 8 * Isa::W) step = score_rows_of<Isa, Dot, 8>;
  step(q, stride, rows, k, keys, units, s, next);
}

// Weights p[row][key] of one row, as elements that lie together; bits say which keys it sees.
template <class Isa, class Dot>
inline void softmax_row(const float* s, int keys, uint64_t visible, float scale, float* base,
                        float* sum, float* decay, float* p) {
  using V = typename Isa::V;
  V logits[kBlock / Isa::W], top = Isa::set1(-kInf);
  const int vectors = (keys + Isa::W - 1) / Isa::W;
  for (int i = 0; i < vectors; ++i) {
    const auto seen = Isa::mask(static_cast<uint32_t>(visible >> (i * Isa::W)));
    const V logit = Isa::mul(Isa::load(s + i * Isa::W), Isa::set1(scale));
    logits[i] = Isa::select(seen, logit, Isa::set1(-kInf));
    top = Isa::max(logits[i], top);
  }
  const float before = *base, most = Isa::greatest(top);
  const float now = before + kSlack < most ? most : before, shift = now == -kInf ? 0.0f : now;
  V total = Isa::zero();
  for (int i = 0; i < vectors; ++i) {
    const V weights = weight<Isa, Dot>(Isa::sub(logits[i], Isa::set1(shift)));
    total = Isa::add(total, weights);
    Dot::store_elements(p, i * Isa::W, weights);
  }
  Isa::store(decay, exp<Isa>(Isa::set1(before - shift)));
  *sum = *sum * *decay + Isa::sum(total);
  *base = now;
}

}  // namespace specattn
