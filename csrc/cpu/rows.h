// The products of a few query rows (one token of a group of heads): lanes are neighbours along D,
// then keys, since rows would leave most of a vector empty. Keys and values are widened on their
// way from the cache to a register.
#pragma once

#include "convert.h"
#include "problem.h"
#include "state.h"
#include "tile.h"
#include "types.h"

namespace specattn {

constexpr int kRowGroup = 4;  // rows that share what was widened

// Up to so many rows this costs less than a tile of sixteen lanes. A matrix unit is faster still,
// unless tokens are gathered: for it they would have to be copied.
template <class Isa, class Elem>
inline bool takes_rows(const Attention& a, int64_t rows) {
  return kTiles<Isa, Elem> ? a.cache.indices && rows <= 4 : rows <= 8;
}

// `count` of a vector of elements; the rest is zero.
template <class Isa, class Elem>
inline typename Isa::V load_some(const Elem* from, int count) {
  if (count >= Isa::W) return Isa::load_as_float(from);
  float some[Isa::W] = {};
  for (int i = 0; i < count; ++i) some[i] = to_float(from[i]);
  return Isa::load(some);
}

// Logits of R rows and W / R keys: lane r * W / R + n belongs to row r and key n.
template <class Isa, class Elem, int R>
inline typename Isa::V row_logits(const float* q, int stride, const char* const* k, int D) {
  using V = typename Isa::V;
  constexpr int N = Isa::W / R;
  V acc[Isa::W];
#pragma GCC unroll 16
  for (int i = 0; i < Isa::W; ++i) acc[i] = Isa::zero();
  const auto add = [&](int d, auto whole) {
    V x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = Isa::load(q + r * stride + d);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const Elem* at = reinterpret_cast<const Elem*>(k[n]) + d;
      const V y = whole ? Isa::load_as_float(at) : load_some<Isa>(at, D - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r * N + n] = Isa::fma(x[r], y, acc[r * N + n]);
    }
  };
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) add(d, std::true_type{});
  if (d < D) add(d, std::false_type{});
  return Isa::sum_each(acc);
}

template <class Isa, class Elem, int R>
__attribute__((noinline)) void score_rows_of(const float* q, int stride, const char* const* k,
                                             int keys, int D, float* s, Prefetch& prefetch) {
  constexpr int N = Isa::W / R;
  for (int n = 0; n < keys; n += N) {
    prefetch.tick(N);
    float logits[Isa::W];
    Isa::store(logits, row_logits<Isa, Elem, R>(q, stride, k + n, D));
    for (int r = 0; r < R; ++r) std::memcpy(s + r * kBlock + n, logits + r * N, N * sizeof(float));
  }
}

// acc[row] = acc[row] * alpha[row] + sum over keys of p[row][key] * v[key], for R rows and DB
// vectors.
template <class Isa, class Elem, int R, int DB>
__attribute__((noinline)) void value_rows_of(const float* p, const char* const* v, int keys,
                                             const float* alpha, float* acc, int column, int stride,
                                             int D, Prefetch& prefetch) {
  using V = typename Isa::V;
  V pv[R][DB];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j) pv[r][j] = Isa::zero();
  for (int n = 0; n < keys; ++n) {
    if (n % kRowGroup == 0) prefetch.tick(kRowGroup);
    const Elem* row = reinterpret_cast<const Elem*>(v[n]) + column;
    V y[DB];
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j) {
      y[j] = DB > 1 ? Isa::load_as_float(row + j * Isa::W) : load_some<Isa>(row, D - column);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V x = Isa::set1(p[r * kBlock + n]);
#pragma GCC unroll 4
      for (int j = 0; j < DB; ++j) pv[r][j] = Isa::fma(x, y[j], pv[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const V factor = Isa::set1(alpha[r]);
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j) {
      float* at = acc + r * stride + column + j * Isa::W;
      Isa::store(at, Isa::fma(Isa::load(at), factor, pv[r][j]));
    }
  }
}

// Calls `step(first row, number of rows)` with a number that the compiler knows.
template <class Step>
inline void in_row_groups(int rows, const Step& step) {
  int row = 0;
  for (; rows - row >= kRowGroup; row += kRowGroup) step(row, Width<kRowGroup>{});
  if (rows - row >= 2) step(row, Width<2>{}), row += 2;
  if (rows - row >= 1) step(row, Width<1>{});
}

// s[row][key] = q[row] . k[key]; rows of q are padded with zeros to whole vectors.
template <class Isa, class Elem>
inline void score_rows(const float* q, int stride, int rows, const char* const* k, int keys, int D,
                       float* s, Prefetch& prefetch) {
  in_row_groups(rows, [&](int row, auto count) {
    score_rows_of<Isa, Elem, decltype(count)::value>(q + row * stride, stride, k, keys, D,
                                                     s + row * kBlock, prefetch);
  });
}

template <class Isa, class Elem>
inline void value_rows(const float* p, int rows, const char* const* v, int keys, const float* alpha,
                       float* acc, int stride, int D, Prefetch& prefetch) {
  in_row_groups(rows, [&](int row, auto count) {
    constexpr int R = decltype(count)::value, DB = Isa::kValueCols;
    const float *weights = p + row * kBlock, *factors = alpha + row;
    float* to = acc + row * stride;
    int d = 0;
    for (; D - d >= DB * Isa::W; d += DB * Isa::W) {
      value_rows_of<Isa, Elem, R, DB>(weights, v, keys, factors, to, d, stride, D, prefetch);
    }
    for (; d < D; d += Isa::W) {
      value_rows_of<Isa, Elem, R, 1>(weights, v, keys, factors, to, d, stride, D, prefetch);
    }
  });
}

// Weights p[row][key] of one row; bits say which keys it sees.
template <class Isa>
inline void softmax_row(const float* s, int keys, uint64_t visible, float scale, float* m, float* l,
                        float* alpha, float* p) {
  using V = typename Isa::V;
  V logits[kBlock / Isa::W], top = Isa::set1(-kInf);
  const int vectors = (keys + Isa::W - 1) / Isa::W;
  for (int i = 0; i < vectors; ++i) {
    const auto seen = Isa::mask(static_cast<uint32_t>(visible >> (i * Isa::W)));
    const V logit = Isa::mul(Isa::load(s + i * Isa::W), Isa::set1(scale));
    logits[i] = Isa::select(seen, logit, Isa::set1(-kInf));
    top = Isa::max(logits[i], top);
  }
  const float before = *m, most = Isa::greatest(top);
  *m = before + kSlack < most ? most : before;
  const float pivot = *m == -kInf ? 0.0f : *m;
  V total = Isa::zero();
  for (int i = 0; i < vectors; ++i) {
    const V weights = exp<Isa>(Isa::sub(logits[i], Isa::set1(pivot)));
    total = Isa::add(total, weights);
    Isa::store(p + i * Isa::W, weights);
  }
  Isa::store(alpha, exp<Isa>(Isa::set1(before - pivot)));
  *l = *l * *alpha + Isa::sum(total);
}

}  // namespace specattn
