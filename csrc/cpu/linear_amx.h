// Linear layers in tiles: rows of weights of 16 bits as they lie in memory, x packed in pairs.
#pragma once

#include "isa_amx.h"
#include "linear_rows.h"

namespace specattn {

// The order of a sum is the matrix unit's own, and the same for every row and column of a tile.
template <class Elem>
struct AmxRows {
  using Tiles = amx::Session;
  static constexpr int kEdge = amx::kEdge, kStep = amx::kDepth;

  static constexpr int rows_at_once(int64_t) { return kEdge; }

  static constexpr int64_t packed(int rows, int64_t K) {
    return rows * round_up(K, kStep) * static_cast<int64_t>(sizeof(Elem)) / 4;
  }

  // Per block of sixteen rows [pair along K][row].
  static void pack(const Linear& p, float* to) {
    uint32_t* at = reinterpret_cast<uint32_t*>(to);
    for (int64_t first = 0; first < p.M; first += kEdge) {
      for (int64_t k = 0; k < round_up(p.K, kStep); k += 2) {
        for (int64_t row = first; row < first + kEdge; ++row) {
          const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_row + k;
          const uint32_t low = row < p.M && k < p.K ? x[0].bits : 0;
          const uint32_t high = row < p.M && k + 1 < p.K ? x[1].bits : 0;
          *at++ = low | high << 16;
        }
      }
    }
  }

  template <int rows>
  static void multiply(const float* x, int64_t K, const Elem* w, int64_t stride, int count,
                       const Elem* next, float (*sums)[kMostColumns]) {
    static_assert(rows == kEdge && kMostColumns == 3 * kEdge);
    if (count > 2 * kEdge) return multiply_tiles<3>(x, K, w, stride, count, next, sums);
    if (count > kEdge) return multiply_tiles<2>(x, K, w, stride, count, next, sums);
    multiply_tiles<1>(x, K, w, stride, count, next, sums);
  }

 private:
  template <int tiles>
  static void multiply_tiles(const float* x, int64_t K, const Elem* w, int64_t stride, int count,
                             const Elem* next, float (*sums)[kMostColumns]) {
    const int64_t most = tuning.stream_ahead / 2 / static_cast<int64_t>(sizeof(Elem));
    alignas(64) float turned[tiles * kEdge][kEdge];
    alignas(64) Elem copy[tiles * kEdge][kStep];
    amx::Operand right = {reinterpret_cast<const char*>(x), 4 * kEdge, 0};
    amx::zero_all<tiles>();
    for (int64_t k = 0; k < K; k += kStep) {
      amx::Operand left = {reinterpret_cast<const char*>(w + k), 2 * stride, 2 * stride * kEdge};
      if (count < tiles * kEdge || K - k < kStep) {
        copy_some(w + k, stride, count, static_cast<int>(std::min<int64_t>(kStep, K - k)), copy[0],
                  tiles * kEdge);
        left = {reinterpret_cast<const char*>(copy), sizeof copy[0], kEdge * sizeof copy[0]};
      }
      const int64_t far = std::min(most, K);
      const Elem* ahead = k + far < K ? w + k + far : next + (k + far - K);
      amx::multiply_all<Elem, tiles, 1>(left, right, [&] {
#pragma GCC unroll 16
        for (int i = 0; i < kEdge; ++i, ahead += stride) __builtin_prefetch(ahead, 0, 2);
      });
      right.at += 4 * kEdge * kStep / 2;
    }
    amx::store_all<tiles, 1>(turned[0], kEdge * kEdge, 0, kEdge);
    for (int c = 0; c < tiles * kEdge; c += kEdge) {
      for (int r = 0; r < kEdge; r += 4) {
        Amx::V four[4];
        Amx::load_four_rows(turned[c] + r, kEdge, four);
        for (int i = 0; i < 4; ++i) Amx::store(sums[r + i] + c, four[i]);
      }
    }
  }

  // The elements that exist, and zeros.
  static void copy_some(const Elem* w, int64_t stride, int count, int depth, Elem* to, int rows) {
    const __mmask32 in = ~uint32_t{0} >> (kStep - depth);
    for (int r = 0; r < rows; ++r) {
      const __mmask32 exists = r < count ? in : 0;
      const Elem* from = w + (r < count ? r : 0) * stride;
      _mm512_store_si512(to + r * kStep, _mm512_maskz_loadu_epi16(exists, from));
    }
  }
};

template <>
struct FewRows<Amx, bf16> : AmxRows<bf16> {};
template <>
struct FewRows<AmxFp16, fp16> : AmxRows<fp16> {};

}  // namespace specattn
