// The products of a few query rows with elements that are multiplied in pairs as they lie in the
// cache. Scores: a quarter of a vector belongs to a row, so sixteen bytes of a key meet four rows
// at once, and a sum has four lanes to add up. Values: lanes are neighbours along D, in pairs of
// keys.
#pragma once

#include <utility>

#include "rows.h"

namespace specattn {

constexpr int kRowsAbreast = 4;
constexpr int kPieceBytes = 16;  // of a row of K, for every quarter

// Logits of kKeyStep keys and Q times four rows; rows of q lie side by side, piece by piece.
template <class Isa, class Elem, int Q>
__attribute__((noinline)) void score_abreast(const float* q, int pieces, const char* const* k,
                                             float* s) {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  V acc[Q][kKeyStep];
#pragma GCC unroll 2
  for (int j = 0; j < Q; ++j)
#pragma GCC unroll 8
    for (int n = 0; n < kKeyStep; ++n) acc[j][n] = Isa::zero();
  for (int i = 0; i < pieces; ++i) {
    V x[Q];
#pragma GCC unroll 2
    for (int j = 0; j < Q; ++j) x[j] = Isa::load(q + (j * pieces + i) * Isa::W);
#pragma GCC unroll 8
    for (int n = 0; n < kKeyStep; ++n) {
      const V y = Isa::broadcast_quarter(k[n] + i * kPieceBytes);
#pragma GCC unroll 2
      for (int j = 0; j < Q; ++j) acc[j][n] = Dot::dot(acc[j][n], x[j], y);
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < Q; ++j) {
    Isa::store_quarter_sums(acc[j], s + j * kRowsAbreast * kBlock, kBlock);
    Isa::store_quarter_sums(acc[j] + 4, s + j * kRowsAbreast * kBlock + 4, kBlock);
  }
}

// part[row] = sum over pairs of keys, more than before unless these are the first, for R rows and
// the columns of DB pairs of vectors, which lie as Pairs::load_pair has them; of a last pair only
// `count` columns exist.
template <class Isa, class Elem, class Pairs, int R, int DB>
__attribute__((noinline)) void value_pairs(const float* p, const char* const* v, int pairs,
                                           bool first, float* part, int column, int count,
                                           int stride) {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  V pv[R][2 * DB];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 2 * DB; ++j) {
      pv[r][j] = first ? Isa::zero() : Isa::load(part + r * stride + column + j * Isa::W);
    }
  for (int u = 0; u < pairs; ++u) {
    V y[2 * DB];
#pragma GCC unroll 2
    for (int j = 0; j < DB; ++j) {
      const int at = column + j * 2 * Isa::W;
      if (DB == 1 && count < 2 * Isa::W) {
        Pairs::load_pair(v[2 * u], v[2 * u + 1], at, count, y);
      } else {
        Pairs::load_pair(v[2 * u], v[2 * u + 1], at, y + 2 * j);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 2 * DB; ++j) pv[r][j] = Dot::dot_at(pv[r][j], y[j], p + r * kBlock + u);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 2 * DB; ++j) Isa::store(part + r * stride + column + j * Isa::W, pv[r][j]);
}

template <class Isa, class Elem>
struct PairedRowProducts {
  static constexpr bool kMixed = false;
  using Weight = Elem;
  static constexpr int kKeys = kKeyStep, kValueKeys = 8, kPieceElems = kPieceBytes / sizeof(Elem);

  static int keys_at_once(int) { return kKeys; }

  // Packs a row of q, whose elements `convert` gives: pieces of four rows lie side by side.
  template <class Convert>
  static void pack(const Elem* q, float* to, int64_t row, int D, int, const Convert& convert) {
    const int pieces = D / kPieceElems;
    Elem* at = reinterpret_cast<Elem*>(to + row / kRowsAbreast * pieces * Isa::W) +
               row % kRowsAbreast * kPieceElems;
    for (int d = 0; d < D; ++d) {
      at[d / kPieceElems * kRowsAbreast * kPieceElems + d % kPieceElems] =
          from_float<Elem>(convert(to_float(q[d])));
    }
  }

  static void score(const float* q, int, int rows, const char* const* k, int D, float* s) {
    if (rows > kRowsAbreast) {
      score_abreast<Isa, Elem, 2>(q, D / kPieceElems, k, s);
    } else {
      score_abreast<Isa, Elem, 1>(q, D / kPieceElems, k, s);
    }
  }

  static void value(const float* p, int n, int rows, const char* const* v, int keys, float* part,
                    int stride, int D) {
    value_of<typename Isa::template Dot<Elem>>(p, n, rows, v, keys, part, stride, D);
  }

  // An odd number of rows of v goes on with a row of zeros.
  template <class Pairs>
  static void value_of(const float* p, int n, int rows, const char* const* v, int keys, float* part,
                       int stride, int D) {
    with_rows(std::make_integer_sequence<int, kFewRows>{}, rows, [&](auto R) {
      constexpr int kWide = decltype(R)::value <= kRowsAbreast ? 2 : 1;  // as registers allow
      const int pairs = static_cast<int>(ceil_div(keys, 2));
      int column = 0;
      const auto range = [&](auto DB) {
        value_pairs<Isa, Elem, Pairs, decltype(R)::value, decltype(DB)::value>(
            p + n / 2, v, pairs, n == 0, part, column, D - column, stride);
        column += decltype(DB)::value * 2 * Isa::W;
      };
      while (D - column >= kWide * 2 * Isa::W) range(Width<kWide>{});
      while (column < D) range(Width<1>{});
    });
  }

  // acc = acc * alpha + part, of one row, in the order of D.
  static void add(float* acc, float alpha, const float* part, int D, float) {
    const auto factor = Isa::set1(alpha);
    for (int d = 0; d < D; d += 2 * Isa::W) {
      typename Isa::V two[2] = {Isa::load(part + d), Isa::load(part + d + Isa::W)};
      Isa::template Dot<Elem>::in_order(two);
      for (int j = 0; j < 2; ++j) {
        float* const at = acc + d + j * Isa::W;
        Isa::store(at, Isa::fma(Isa::load(at), factor, two[j]));
      }
    }
  }

 private:
  // Calls step with a number that the compiler knows.
  template <int... n, class Step>
  static void with_rows(std::integer_sequence<int, n...>, int rows, const Step& step) {
    static_cast<void>(((rows == n + 1 && (step(Width<n + 1>{}), true)) || ...));
  }
};

template <class Isa, class Elem>
inline constexpr bool kPairsFewRows = Isa::template Dot<Elem>::kPair == 2 && !kTiles<Isa, Elem>;

// The products of a few rows with a cache of 8 bits, and with a tree beside it, by floats; over
// kUnit.
template <class Isa, class Elem>
struct MixedRowProducts : WidenedRowProducts<Isa, Elem> {
  static constexpr bool kMixed = true;
  static constexpr bool kOverUnit = true;
  Dtype type;  // of the keys that come next

  template <class Convert>
  static void pack(const Elem* q, float* to, int64_t row, int64_t, int D, int stride,
                   const Convert& convert) {
    WidenedRowProducts<Isa, Elem>::pack(q, to, row, D, stride, convert);
  }

  void score(const float* q, int stride, int rows, const char* const* k, int D, float* s) const {
    if (!of_8_bits(type)) {
      return WidenedRowProducts<Isa, Elem>::score(q, stride, rows, k, D, s);
    }
    with_stored(k, WidenedRowProducts<Isa, Elem>::keys_at_once(rows), D, [&](auto tag) {
      WidenedRowProducts<Isa, typename decltype(tag)::type>::score(q, stride, rows, k, D, s);
    });
  }

  void value(const float* p, int n, int rows, const char* const* v, int keys, float* part,
             int stride, int D) const {
    if (!of_8_bits(type)) {
      return WidenedRowProducts<Isa, Elem>::value(p, n, rows, v, keys, part, stride, D);
    }
    with_stored(v, keys, D, [&](auto tag) {
      WidenedRowProducts<Isa, typename decltype(tag)::type>::value(p, n, rows, v, keys, part,
                                                                   stride, D);
    });
  }

 private:
  template <class Function>
  void with_stored(const char* const* rows, int count, int D, const Function& function) const {
    const bool numbers = type == Dtype::kFloat8E4M3 && !Isa::holds_nan(rows, count, D);
    if (numbers) return function(Tag<e4m3_number>{});
    with_8_bits(type, function);
  }
};

// Two vectors of a row of 8 bits become elements, from column d on, or what is left of them.
template <class Isa, class Elem, class Stored>
struct CopiedUnits {
  static constexpr int kPair = Isa::template Dot<Elem>::kPair;
  static constexpr int kOnce = 2 * Isa::W * kPair;

  // That a whole row takes.
  static int floats(int D) { return static_cast<int>(round_up(D, kOnce)) / kPair; }

  static void copy(const char* row, int d, int D, float* to) {
    using Units = typename Isa::template Units<Stored>;
    typename Isa::V two[2];
    if (D - d >= kOnce) {
      Units::load(row + d, two);
    } else {
      Units::load(row + d, D - d, two);
    }
    Isa::store(to + d / kPair, two[0]), Isa::store(to + d / kPair + Isa::W, two[1]);
  }
};

// Logits of `keys` keys and R rows, a vector of them at a time; rows of q lie in the order of D.
template <class Isa, class Elem, class Stored, int R>
__attribute__((noinline)) void score_units(const float* q, int stride, const char* const* k,
                                           int keys, int D, float* s) {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  using Units = typename Isa::template Units<Stored>;
  constexpr int N = Isa::W / R, kOnce = 4 * Isa::W;
  for (int first = 0; first < keys; first += N) {
    V acc[Isa::W];
#pragma GCC unroll 16
    for (int i = 0; i < Isa::W; ++i) acc[i] = Isa::zero();
    const auto add = [&](int d, auto whole) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const char* const at = k[first + n] + d * static_cast<int64_t>(sizeof(Stored));
        V y[2];
        if constexpr (whole) {
          Units::load(at, y);
        } else {
          Units::load(at, D - d, y);
        }
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const V x = Isa::load(q + r * stride + d / 2 + j * Isa::W);
            acc[r * N + n] = Dot::dot(acc[r * N + n], x, y[j]);
          }
      }
    };
    int d = 0;
    for (; d + kOnce <= D; d += kOnce) add(d, std::true_type{});
    if (d < D) add(d, std::false_type{});
    float logits[Isa::W];
    Isa::store(logits, Isa::sum_each(acc));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      std::memcpy(s + r * kBlock + first, logits + r * N, N * sizeof(float));
    }
  }
}

// The products of a few rows with a cache of 8 bits, and with a tree beside it, in pairs.
template <class Isa, class Elem>
class UnitRowProducts : public PairedRowProducts<Isa, Elem> {
  using Base = PairedRowProducts<Isa, Elem>;

 public:
  static constexpr bool kMixed = true, kOverUnit = false;
  static constexpr int kKeys = 2 * kKeyStep, kValueKeys = 4 * kKeyStep;  // fewer bytes
  Dtype type;  // of the keys that come next

  static int keys_at_once(int) { return kKeys; }

  // Packs a row of q, of so many: in the order of D where these are multiplied by what is loaded.
  template <class Convert>
  static void pack(const Elem* q, float* to, int64_t row, int64_t rows, int D, int stride,
                   const Convert& convert) {
    if (rows > kRowsAbreast) return Base::pack(q, to, row, D, stride, convert);
    Elem* const at = reinterpret_cast<Elem*>(to + row * stride);
    for (int d = 0; d < D; ++d) at[d] = from_float<Elem>(convert(to_float(q[d])));
  }

  // For more than four rows keys become elements in the L1 cache, a few at a time.
  void score(const float* q, int stride, int rows, const char* const* k, int D, float* s) {
    if (rows <= kRowsAbreast) {
      return with_stored([&](auto tag) {
        using Stored = typename decltype(tag)::type;
        score_units<Isa, Elem, Stored, kRowsAbreast>(q, stride, k, kKeys, D, s);
      });
    }
    if (!of_8_bits(type)) {
      for (int n = 0; n < kKeys; n += kKeyStep) Base::score(q, stride, rows, k + n, D, s + n);
      return;
    }
    for (int first = 0; first < kKeys; first += kKeyStep) {
      const char* copies[kKeyStep];
      with_8_bits(type, [&](auto tag) {
        using Copied = CopiedUnits<Isa, Elem, typename decltype(tag)::type>;
        for (int n = 0; n < kKeyStep; ++n) {
          float* const row = keys_ + n * Copied::floats(D);
          copies[n] = reinterpret_cast<char*>(row);
          for (int d = 0; d < D; d += Copied::kOnce) Copied::copy(k[first + n], d, D, row);
        }
      });
      Base::score(q, stride, rows, copies, D, s + first);
    }
  }

  void value(const float* p, int n, int rows, const char* const* v, int keys, float* part,
             int stride, int D) const {
    with_stored([&](auto tag) {
      using Units = typename Isa::template Units<typename decltype(tag)::type>;
      PairedRowProducts<Isa, Elem>::template value_of<Units>(p, n, rows, v, keys, part, stride, D);
    });
  }

  // acc = acc * alpha + part * unit, of one row.
  static void add(float* acc, float alpha, const float* part, int D, float unit) {
    const auto factor = Isa::set1(alpha), times = Isa::set1(unit);
    for (int d = 0; d < D; d += Isa::W) {
      const auto sum = Isa::mul(Isa::load(part + d), times);
      Isa::store(acc + d, Isa::fma(Isa::load(acc + d), factor, sum));
    }
  }

 private:
  template <class Function>
  void with_stored(const Function& function) const {
    if (!of_8_bits(type)) return function(Tag<Elem>{});
    with_8_bits(type, function);
  }

  alignas(64) float keys_[kKeyStep * kMaxHeadDim / 2];
};

template <class Isa, class Elem>
using FewRowProducts = std::conditional_t<kPairsFewRows<Isa, Elem>, PairedRowProducts<Isa, Elem>,
                                          WidenedRowProducts<Isa, Elem>>;

// The same for a cache of 8 bits.
template <class Isa, class Elem>
using FewStoredProducts = std::conditional_t<kPairsFewRows<Isa, Elem>, UnitRowProducts<Isa, Elem>,
                                             MixedRowProducts<Isa, Elem>>;

}  // namespace specattn
