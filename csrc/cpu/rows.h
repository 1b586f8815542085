// The products of a few query rows (one token of a group of heads): lanes are neighbours along D,
// then keys, since rows would leave most of a vector empty. Keys and values are widened on their
// way from the cache to a register (but see rows_paired.h).
#pragma once

#include <algorithm>

#include "convert.h"
#include "problem.h"
#include "state.h"
#include "tile.h"
#include "types.h"

namespace specattn {

constexpr int kRowGroup = 4;  // rows that share what was widened
constexpr int kFewRows = 8;   // up to so many rows this costs less than a tile of sixteen lanes

// A matrix unit is faster still, unless tokens are gathered: for it they would have to be copied.
template <class Isa, class Elem>
inline bool takes_rows(const Attention& a, int64_t rows) {
  return kTiles<Isa, Elem> ? a.cache.indices && rows <= 4 : rows <= kFewRows;
}

// `count` of a vector of elements over kUnit; the rest is zero.
template <class Isa, class Elem>
inline typename Isa::V load_some(const Elem* from, int count) {
  if (count >= Isa::W) return Isa::load_units(from);
  float some[Isa::W] = {};
  for (int i = 0; i < count; ++i) some[i] = to_float(from[i]) / kUnit<Elem>;
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
      const V y = whole ? Isa::load_units(at) : load_some<Isa>(at, D - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r * N + n] = Isa::fma(x[r], y, acc[r * N + n]);
    }
  };
  // Two vectors at once: of what are fewer, keys or rows, both stay in registers.
  const auto add_two = [&](int d) {
    if constexpr (R > N) {
      V y[N][2];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        Isa::load_two_units(reinterpret_cast<const Elem*>(k[n]) + d, y[n]);
      }
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V x = Isa::load(q + r * stride + d + j * Isa::W);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) acc[r * N + n] = Isa::fma(x, y[n][j], acc[r * N + n]);
        }
    } else {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        V y[2];
        Isa::load_two_units(reinterpret_cast<const Elem*>(k[n]) + d, y);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) {
            const V x = Isa::load(q + r * stride + d + j * Isa::W);
            acc[r * N + n] = Isa::fma(x, y[j], acc[r * N + n]);
          }
      }
    }
  };
  int d = 0;
  if constexpr (std::is_same_v<Elem, e4m3_number> || std::is_same_v<Elem, e5m2>) {
    for (; d + 2 * Isa::W <= D; d += 2 * Isa::W) add_two(d);
  }
  for (; d + Isa::W <= D; d += Isa::W) add(d, std::true_type{});
  if (d < D) add(d, std::false_type{});
  return Isa::sum_each(acc);
}

template <class Isa, class Elem, int R>
__attribute__((noinline)) void score_rows_of(const float* q, int stride, const char* const* k,
                                             int keys, int D, float* s) {
  constexpr int N = Isa::W / R;
  for (int n = 0; n < keys; n += N) {
    float logits[Isa::W];
    Isa::store(logits, row_logits<Isa, Elem, R>(q, stride, k + n, D));
    for (int r = 0; r < R; ++r) std::memcpy(s + r * kBlock + n, logits + r * N, N * sizeof(float));
  }
}

// part[row] = sum over keys of p[row][key] * v[key], more than before unless these are the first
// keys, for R rows and DB vectors.
template <class Isa, class Elem, int R, int DB>
__attribute__((noinline)) void value_rows_of(const float* p, const char* const* v, int keys,
                                             bool first, float* part, int column, int stride,
                                             int D) {
  using V = typename Isa::V;
  V pv[R][DB];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j) {
      pv[r][j] = first ? Isa::zero() : Isa::load(part + r * stride + column + j * Isa::W);
    }
  for (int n = 0; n < keys; ++n) {
    const Elem* row = reinterpret_cast<const Elem*>(v[n]) + column;
    V y[DB];
    if constexpr (DB == 1) {
      y[0] = load_some<Isa>(row, D - column);
    } else {
#pragma GCC unroll 2
      for (int j = 0; j < DB; j += 2) Isa::load_two_units(row + j * Isa::W, y + j);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V x = Isa::set1(p[r * kBlock + n]);
#pragma GCC unroll 4
      for (int j = 0; j < DB; ++j) pv[r][j] = Isa::fma(x, y[j], pv[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < DB; ++j) Isa::store(part + r * stride + column + j * Isa::W, pv[r][j]);
}

// Calls `step(first row, number of rows)` with a number that the compiler knows.
template <class Step>
inline void in_row_groups(int rows, const Step& step) {
  int row = 0;
  for (; rows - row >= kRowGroup; row += kRowGroup) step(row, Width<kRowGroup>{});
  if (rows - row >= 2) step(row, Width<2>{}), row += 2;
  if (rows - row >= 1) step(row, Width<1>{});
}

// The products of rows whose elements are widened; results are over their kUnit.
template <class Isa, class Elem>
struct WidenedRowProducts {
  static constexpr bool kMixed = false;
  using Weight = float;
  // That are scored at most, and whose values are added, at a time.
  static constexpr int kKeys = std::max(Isa::W, 8);
  static constexpr int kValueKeys = Isa::kPrefetchesInOrder ? 4 : 8;

  // In the order of addresses as few as make a vector of logits: their rows are long.
  static int keys_at_once(int rows) {
    return Isa::kPrefetchesInOrder && rows % kRowGroup == 0 ? Isa::W / kRowGroup : kKeys;
  }

  // Packs a row of q, whose elements `convert` gives: in the order of D.
  template <class Convert>
  static void pack(const Elem* q, float* to, int64_t row, int D, int stride,
                   const Convert& convert) {
    for (int d = 0; d < D; ++d) to[row * stride + d] = convert(to_float(q[d]));
  }

  // s[row][key] = q[row] . k[key] for some keys; rows of q are padded with zeros to whole vectors.
  static void score(const float* q, int stride, int rows, const char* const* k, int D, float* s) {
    const int keys = keys_at_once(rows);
    in_row_groups(rows, [&](int row, auto count) {
      score_rows_of<Isa, Elem, decltype(count)::value>(q + row * stride, stride, k, keys, D,
                                                       s + row * kBlock);
    });
  }

  // part[row] = sum over some keys, from the block's key n on, of p[row][key] * v[key].
  static void value(const float* p, int n, int rows, const char* const* v, int keys, float* part,
                    int stride, int D) {
    in_row_groups(rows, [&](int row, auto count) {
      constexpr int R = decltype(count)::value, DB = Isa::kValueCols;
      const float* weights = p + row * kBlock + n;
      float* to = part + row * stride;
      int d = 0;
      for (; D - d >= DB * Isa::W; d += DB * Isa::W) {
        value_rows_of<Isa, Elem, R, DB>(weights, v, keys, n == 0, to, d, stride, D);
      }
      for (; d < D; d += Isa::W) {
        value_rows_of<Isa, Elem, R, 1>(weights, v, keys, n == 0, to, d, stride, D);
      }
    });
  }

  // acc = acc * alpha + part, of one row.
  static void add(float* acc, float alpha, const float* part, int D, float) {
    const auto factor = Isa::set1(alpha);
    for (int d = 0; d < D; d += Isa::W) {
      Isa::store(acc + d, Isa::fma(Isa::load(acc + d), factor, Isa::load(part + d)));
    }
  }
};

// Weights p[key] of one row, as floats or `Elem`; bits say which keys it sees.
template <class Isa, class Elem>
inline void softmax_row(const float* s, int keys, uint64_t visible, float scale, float* m, float* l,
                        float* alpha, Elem* p) {
  using V = typename Isa::V;
  V logits[kBlock / Isa::W], top = Isa::set1(-kInf);
  const int vectors = (keys + Isa::W - 1) / Isa::W;
  for (int i = 0; i < vectors; ++i) {
    const auto seen = Isa::mask(static_cast<uint32_t>(visible >> (i * Isa::W)));
    logits[i] = Isa::select(seen, Isa::load(s + i * Isa::W), Isa::set1(-kInf));
    top = Isa::max(logits[i], top);
  }
  const float before = *m, most = Isa::greatest(top) * scale;
  *m = before + kSlack < most ? most : before;
  const float pivot = *m == -kInf ? 0.0f : *m;
  const Weigh<Isa, !std::is_same_v<Elem, float>> weigh(scale, Isa::set1(pivot));
  V total = Isa::zero();
  for (int i = 0; i < vectors; ++i) {
    const V weights = weigh(logits[i]);
    total = Isa::add(total, weights);
    Isa::store_as(p + i * Isa::W, weights);
  }
  if (before == pivot) {  // mostly
    *alpha = 1.0f;
  } else {
    Isa::store(alpha, exp<Isa>(Isa::set1(before - pivot)));
  }
  *l = *l * *alpha + Isa::sum(total);
}

}  // namespace specattn
