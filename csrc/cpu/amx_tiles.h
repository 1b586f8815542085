// Tiles of the matrix unit: eight registers of sixteen rows of 64 bytes.
#pragma once

#include <type_traits>

#include "types.h"

namespace specattn::amx {

constexpr int kEdge = 16;   // rows and columns of a tile of sums
constexpr int kDepth = 32;  // elements that one product sums over

// Sets all tiles to their full size; lives as long as a task on its thread.
class Session {
 public:
  Session() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Session() { __asm__ volatile("tilerelease"); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

// The compiler's own intrinsics take no template arguments and hide from it what they read.
template <int tile>
inline void zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
inline void load(const void* rows, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void store(void* rows, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}

// sum[i][j] += a[i][2u] * b[u][2j] + a[i][2u + 1] * b[u][2j + 1], over sixteen pairs u.
template <class Elem, int sum, int a, int b>
inline void multiply() {
  if constexpr (std::is_same_v<Elem, bf16>) {
    __asm__ volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(b), "i"(a), "i"(sum));
  } else {  // tdpfp16ps, which assemblers know since 2022
    static_assert(std::is_same_v<Elem, fp16>);
    constexpr int kSecond = (~b & 15) << 3 | 3, kRegisters = 0xc0 | sum << 3 | a;
    __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" ::"i"(kSecond), "i"(kRegisters));
  }
}

// What a product reads: rows of 32 elements, or of 16 pairs of them, and where the next tile lies.
struct Operand {
  const char* at;
  int64_t stride, apart;  // bytes
};

// All A x B sums of tiles a of one operand and b of the other: registers 0 to A * B - 1. Between
// two products goes whatever else is to be done.
template <class Elem, int A, int B, int a = 0, int b = 0, class Between>
inline void multiply_all(const Operand& left, const Operand& right, const Between& between) {
  static_assert(A * B <= 4);
  // Registers of operands take turns, so that a load need not wait for the product before.
  constexpr int first = A == 1 ? 4 : 4 + a % 2, second = A == 1 ? 5 + b % 3 : 6 + b % 2;
  if constexpr (b == 0) load<first>(left.at + a * left.apart, left.stride);
  if constexpr (a == 0) load<second>(right.at + b * right.apart, right.stride);
  multiply<Elem, a * B + b, first, second>();
  between();
  if constexpr (b + 1 < B) {
    multiply_all<Elem, A, B, a, b + 1>(left, right, between);
  } else if constexpr (a + 1 < A) {
    multiply_all<Elem, A, B, a + 1, 0>(left, right, between);
  }
}

// A product of what operands hold, onto one of them: an idle unit goes to sleep after some hundred
// cycles, and the next products then pay for its waking.
inline void stay_awake() { multiply<bf16, 7, 6, 5>(); }

template <int count, int tile = 0>
inline void zero_all() {
  zero<tile>();
  if constexpr (tile + 1 < count) zero_all<count, tile + 1>();
}

// Tiles of sums, A x B of them, `down` and `across` floats apart in rows of `stride` floats.
template <int A, int B, int tile = 0>
inline void load_all(const float* sums, int64_t down, int64_t across, int64_t stride) {
  load<tile>(sums + tile / B * down + tile % B * across, 4 * stride);
  if constexpr (tile + 1 < A * B) load_all<A, B, tile + 1>(sums, down, across, stride);
}

template <int A, int B, int tile = 0>
inline void store_all(float* sums, int64_t down, int64_t across, int64_t stride) {
  store<tile>(sums + tile / B * down + tile % B * across, 4 * stride);
  if constexpr (tile + 1 < A * B) store_all<A, B, tile + 1>(sums, down, across, stride);
}

}  // namespace specattn::amx
