// AMX: keys and values of 16 bits are multiplied in tiles of 16 x 16 sums over 32 elements,
// bfloat16 by all processors with AMX, float16 by some.
//
// S^T = K Q^T takes rows of K as they lie in the cache, and Q packed in pairs along D. O = P V
// wants V in pairs of keys: for many query rows the rows of V are woven together. For a few, V is
// taken as it lies, as pairs of neighbours along D: weights with a zero beside them pick the one or
// the other, which is twice the products and no copy. The softmax turns the weights over on its
// way. All other types are multiplied as in AVX-512.
#pragma once

#include "amx_tiles.h"
#include "isa_avx512.h"
#include "prefetch.h"
#include "state.h"

namespace specattn {

struct Amx : Avx512Bf16 {
  static constexpr int kEdge = amx::kEdge, kDepth = amx::kDepth;
  using Tiles = amx::Session;

  template <class Elem>
  struct Dot : Avx512Bf16::Dot<Elem> {};

  static void stay_awake() { amx::stay_awake(); }

  // Most query rows that take V as it lies.
  static constexpr int kDirectRows = 16;

  // Columns of O are the even ones of each 32, then the odd ones: where column d lies, and how they
  // come back to the order of D.
  static int place(int d) { return d / kDepth * kDepth + d % 2 * kEdge + d % kDepth / 2; }
  static void straighten(float* row, int D) {
    const __m512i lane = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i half = _mm512_set1_epi32(8);
    for (int d = 0; d < D; d += kDepth) {
      const V even = load(row + d), odd = load(row + d + kEdge);
      store(row + d, _mm512_permutex2var_ps(even, lane, odd));
      store(row + d + kEdge, _mm512_permutex2var_ps(even, _mm512_add_epi32(lane, half), odd));
    }
  }

  // What the keys of a step take: a tick is a product, eight pairs of values or eight keys of a
  // softmax; or eight keys that are copied.
  static int ticks(int64_t rows, int64_t keys, int64_t D) {
    const int64_t tiles = ceil_div(rows, kEdge), products = ceil_div(keys, kDepth);
    const int64_t columns = ceil_div(D, kDepth), paired = rows > kDirectRows;
    const int64_t scores = 2 * products * columns, values = (paired ? 2 : 4) * products * columns;
    return static_cast<int>(paired * keys / 16 + tiles * (scores + 4 * products + values));
  }
  static int copy_ticks(int keys) { return keys / 8; }

  // Rows of a cache side by side and in whole tiles: strides of a cache would share few sets of L1.
  static void copy_rows(const char* const* rows, int count, int D, float* copy,
                        Prefetch& prefetch) {
    const int stride = static_cast<int>(round_up(D, kDepth)) * 2;
    char* to = reinterpret_cast<char*>(copy);
    for (int n = 0; n < count; ++n, to += stride) {
      if (n % 8 == 0) rest(prefetch);
      int d = 0;
      for (; d + kDepth <= D; d += kDepth) {
        _mm512_store_si512(to + 2 * d, _mm512_loadu_si512(rows[n] + 2 * d));
      }
      if (d == D) continue;
      const __mmask32 in = (uint32_t{1} << (D - d)) - 1;
      _mm512_store_si512(to + 2 * d, _mm512_maskz_loadu_epi16(in, rows[n] + 2 * d));
    }
    std::memset(to, 0, static_cast<size_t>(round_up(count, kDepth) - count) * stride);
  }

  // Pairs of value rows n and n + 16 of each 32: of 32 columns the even ones, then the odd ones.
  // What does not exist is zero up to a whole product: the memory may hold another call's NaN.
  static void pair_values(const char* const* v, int keys, int D, float* pairs, int stride,
                          Prefetch& prefetch) {
    static const bf16 nothing[kMaxHeadDim] = {};
    const auto row = [&](int n) {
      return n < keys ? v[n] : reinterpret_cast<const char*>(nothing);
    };
    for (int pair = 0; pair < round_up(keys, kDepth) / 2; ++pair, pairs += stride) {
      if (pair % 8 == 0) rest(prefetch);
      const int n = pair / kEdge * kDepth + pair % kEdge;
      const char *a = row(n), *b = row(n + kEdge);
      for (int d = 0; d < D; d += kDepth) {
        const __mmask32 in = ~uint32_t{0} >> std::max(kDepth - (D - d), 0);
        const __m512i x = _mm512_maskz_loadu_epi16(in, a + 2 * d);
        const __m512i y = _mm512_maskz_loadu_epi16(in, b + 2 * d);
        const __m512i even = _mm512_mask_mov_epi16(x, 0xaaaaaaaa, _mm512_slli_epi32(y, 16));
        const __m512i odd = _mm512_mask_mov_epi16(y, 0x55555555, _mm512_srli_epi32(x, 16));
        _mm512_storeu_si512(pairs + d, even);
        _mm512_storeu_si512(pairs + d + kEdge, odd);
      }
    }
  }

  // s[key][row] = k[key] . q[row] for whole tiles of keys; q is packed [pair][rows].
  template <class Elem>
  static void score_tile(const float* q, int rows, StridedRows k, int keys, int depth, float* s,
                         Prefetch& prefetch) {
    const int tiles = keys / kEdge;
    if (rows == kEdge) {
      if (tiles == 1) scores<Elem, 1, 1>(q, rows, k, depth, s, prefetch);
      if (tiles == 2) scores<Elem, 2, 1>(q, rows, k, depth, s, prefetch);
      if (tiles == 3) scores<Elem, 3, 1>(q, rows, k, depth, s, prefetch);
      if (tiles == 4) scores<Elem, 4, 1>(q, rows, k, depth, s, prefetch);
      return;
    }
    for (int n = 0; n < tiles; n += 2) {
      const StridedRows from = {k.first + n * kEdge * k.stride, k.stride};
      if (n + 1 < tiles) scores<Elem, 2, 2>(q, rows, from, depth, s + n * kEdge * kTile, prefetch);
      if (n + 1 == tiles) scores<Elem, 1, 2>(q, rows, from, depth, s + n * kEdge * kTile, prefetch);
    }
  }

  // acc[row] += sum over keys [first, last) of p[row][key] * v[key].
  template <class Elem>
  static void value_tile(const float* p, int rows, int first, int last, StridedRows v, bool paired,
                         float* acc, int stride, Prefetch& prefetch) {
    if (paired) {
      paired_values<Elem>(p + first / 2, rows, (last - first) / 2, v.first + first / 2 * v.stride,
                          acc, stride, prefetch);
    } else {
      direct_values<Elem>(p + first, rows, last - first, {v.first + first * v.stride, v.stride},
                          acc, stride, prefetch);
    }
  }

  // Lets m of sixteen rows follow their logits s[key][row] / scale and rescales l. True where an m
  // moved: alpha then rescales the accumulators.
  static bool raise_max(const float* s, int keys, float scale, float* m, float* l, float* alpha) {
    stay_awake();
    V top[4] = {set1(-kInf), set1(-kInf), set1(-kInf), set1(-kInf)};
    for (int n = 0; n < keys; n += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) top[i] = max(load(s + (n + i) * kTile), top[i]);
    }
    const RunningMax<Amx> step(load(m), max(max(top[0], top[1]), max(top[2], top[3])), scale);
    if (_mm512_cmp_ps_mask(step.alpha, set1(1.0f), _CMP_NEQ_UQ) == 0) return false;
    store(m, step.m);
    store(l, mul(load(l), step.alpha));
    store(alpha, step.alpha);
    return true;
  }

  // Whether each of sixteen rows has seen a key.
  static bool all_seen(const float* m) {
    return _mm512_cmp_ps_mask(load(m), set1(-kInf), _CMP_EQ_OQ) == 0;
  }

  // Turns logits s[key][row] / scale of sixteen rows into weights of `p`, from row `row` and key
  // `at` on. They lie [row][pair of keys], or where V is taken as it lies [even, odd][row][key].
  // False where they are too large for their m, or no numbers: then l stays.
  template <class Elem>
  static bool weigh(const float* s, int keys, float scale, const float* m, float* l, float* p,
                    int row, int at, bool paired, bool may_fail, Prefetch& prefetch) {
    constexpr float kLog2e = 1.44269504f;
    const V seen = load(m), factor = set1(scale * kLog2e);
    const V pivot = select(less(set1(-kInf), seen), seen, zero());
    const V shift = mul(pivot, set1(-kLog2e));
    V total = zero();
    for (int first = 0; first < keys; first += kDepth) {
      const float* from = s + first * kTile;
      __m512i both[kEdge];
      stay_awake();
      for (int quarter = 0; quarter < 4; ++quarter) {
        prefetch.tick();
#pragma GCC unroll 4
        for (int i = 4 * quarter; i < 4 * quarter + 4; ++i) {
          const int key = i / 2 + i % 2 * kEdge;  // of the first sixteen lanes; of the others + 8
          const V a = exp2<Amx, true>(fma(load(from + key * kTile), factor, shift));
          const V b = exp2<Amx, true>(fma(load(from + (key + 8) * kTile), factor, shift));
          total = add(total, add(a, b));
          both[i] = narrow<Elem>(a, b);
        }
      }
      turn(both);
      if (paired) {
        store_pairs(both, p + row * kPairs + (at + first) / 2);
      } else {
        store_apart(both, p + row * kBlock + at + first);
      }
    }
    const bool fits = _mm512_cmp_ps_mask(total, set1(kMostWeight), _CMP_NLE_UQ) == 0;
    if (may_fail && !fits) return false;
    store(l, add(load(l), total));
    return true;
  }

 private:
  // A tiles of keys against B tiles of rows.
  template <class Elem, int A, int B>
  static void scores(const float* q, int rows, StridedRows k, int depth, float* s,
                     Prefetch& prefetch) {
    const int64_t row_bytes = 4 * rows;
    amx::Operand left = {k.first, k.stride, kEdge * k.stride};
    amx::Operand right = {reinterpret_cast<const char*>(q), row_bytes, 64};
    amx::zero_all<A * B>();
    for (int d = 0; d < depth; d += kDepth) {
      amx::multiply_all<Elem, A, B>(left, right, [&] { prefetch.tick(); });
      left.at += 2 * kDepth;
      right.at += kEdge * row_bytes;
    }
    amx::store_all<A, B>(s, kEdge * kTile, kEdge, kTile);
  }

  static constexpr int kPairs = kMostKeys / 2;          // of a row of weights
  static constexpr int kParity = kDirectRows * kBlock;  // from weights of even columns to odd

  template <class Elem>
  static void paired_values(const float* p, int rows, int pairs, const char* v, float* acc,
                            int stride, Prefetch& prefetch) {
    const int64_t step = 4 * kEdge * stride;
    amx::Operand weights = {reinterpret_cast<const char*>(p), 4 * kPairs, 4 * kPairs * kEdge};
    for (int row = 0; row < rows; row += 2 * kEdge, weights.at += 2 * kEdge * weights.stride) {
      amx::Operand right = {v, 4 * stride, 64};
      for (int column = 0; column < stride; column += kDepth, right.at += 4 * kDepth) {
        float* to = acc + row * stride + column;
        if (rows - row >= 2 * kEdge) {
          values<Elem, 2, 2>(weights, right, pairs, step, to, kEdge * stride, kEdge, stride,
                             prefetch);
        } else {
          values<Elem, 1, 2>(weights, right, pairs, step, to, kEdge * stride, kEdge, stride,
                             prefetch);
        }
      }
    }
  }

  template <class Elem>
  static void direct_values(const float* p, int rows, int keys, StridedRows v, float* acc,
                            int stride, Prefetch& prefetch) {
    for (int row = 0; row < rows; row += kEdge) {
      const amx::Operand left = {reinterpret_cast<const char*>(p + row * kBlock), 4 * kBlock,
                                 4 * kParity};
      amx::Operand right = {v.first, v.stride, 64};
      for (int column = 0; column < stride;) {
        float* to = acc + row * stride + column;
        if (stride - column >= 2 * kDepth) {
          values<Elem, 2, 2>(left, right, keys, kEdge * v.stride, to, kEdge, kDepth, stride,
                             prefetch);
          column += 2 * kDepth;
        } else {
          values<Elem, 2, 1>(left, right, keys, kEdge * v.stride, to, kEdge, kDepth, stride,
                             prefetch);
          column += kDepth;
        }
        right.at = v.first + 2 * column;
      }
    }
  }

  // A tiles of weights against B tiles of V, `step` bytes further for every sixteen of `depth`.
  // Tiles of sums lie `down` and `across` floats from each other in rows of `stride`.
  template <class Elem, int A, int B>
  static void values(amx::Operand p, amx::Operand v, int depth, int64_t step, float* acc,
                     int64_t down, int64_t across, int64_t stride, Prefetch& prefetch) {
    amx::load_all<A, B>(acc, down, across, stride);
    for (int u = 0; u < depth; u += kEdge) {
      amx::multiply_all<Elem, A, B>(p, v, [&] { prefetch.tick(); });
      p.at += 4 * kEdge;
      v.at += step;
    }
    amx::store_all<A, B>(acc, down, across, stride);
  }

  // A moment in which nothing is multiplied.
  static void rest(Prefetch& prefetch) {
    prefetch.tick();
    stay_awake();
  }

  // Two vectors as one of 16 bits, rounded to nearest even.
  template <class Elem>
  static __m512i narrow(V low, V high) {
    if constexpr (std::is_same_v<Elem, bf16>) return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i first = _mm512_castsi256_si512(_mm512_cvtps_ph(low, kNearest));
    return _mm512_inserti64x4(first, _mm512_cvtps_ph(high, kNearest), 1);
  }

  static void store_pairs(const __m512i* rows, float* p) {
#pragma GCC unroll 16
    for (int r = 0; r < kEdge; ++r) _mm512_storeu_si512(p + r * kPairs, rows[r]);
  }

  static void store_apart(const __m512i* rows, float* even) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    float* odd = even + kParity;
#pragma GCC unroll 16
    for (int r = 0; r < kEdge; ++r) {
      const __m512i x = rows[r];
      _mm512_storeu_si512(even + r * kBlock, _mm512_andnot_si512(high, x));
      _mm512_storeu_si512(odd + r * kBlock, _mm512_slli_epi32(x, 16));
      _mm512_storeu_si512(even + r * kBlock + kEdge, _mm512_srli_epi32(x, 16));
      _mm512_storeu_si512(odd + r * kBlock + kEdge, _mm512_and_si512(high, x));
    }
  }

  // Sixteen vectors of two keys x sixteen rows become sixteen rows of pairs of keys n, n + 16.
  static void turn(__m512i* both) {
    __m512i pairs[16], fours[16], eights[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      pairs[i] = _mm512_unpacklo_epi16(both[2 * i], both[2 * i + 1]);
      pairs[8 + i] = _mm512_unpackhi_epi16(both[2 * i], both[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // 4 * half of the rows + half of the keys, low and high rows
      fours[2 * i] = _mm512_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
      fours[2 * i + 1] = _mm512_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const __m512i a = fours[4 * i + j], b = fours[4 * i + 2 + j];
        eights[4 * i + 2 * j] = _mm512_unpacklo_epi64(a, b);
        eights[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a, b);
      }
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // row i and row 8 + i
      const __m512i a = eights[i / 4 * 8 + i % 4], b = eights[i / 4 * 8 + 4 + i % 4];
      both[i] = _mm512_permutex2var_epi64(a, low, b);
      both[8 + i] = _mm512_permutex2var_epi64(a, high, b);
    }
  }
};

template <>
struct Amx::Dot<bf16> : Avx512Bf16::Dot<bf16> {};

// The same with products of float16.
struct AmxFp16 : Amx {
  template <class Elem>
  struct Dot : Amx::Dot<Elem> {};
};

template <>
inline constexpr bool kTiles<Amx, bf16> = true;
template <>
inline constexpr bool kTiles<AmxFp16, fp16> = true;

}  // namespace specattn
