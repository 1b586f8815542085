// Codes that are floats of 8 bits (e4m3): in registers numbers over kUnit, exactly. Every code is
// taken for a number; who makes weights refuses those that are none.
#pragma once

#include "codes.h"
#include "types.h"

namespace specattn {

// A block of codes, as Isa's Bytes: `numbers` makes 32 of them V.
template <class Isa, int kPair>
struct Float8Codes {
  static_assert(kPair == 1);
  using V = typename Isa::V;
  struct Zero {};
  static constexpr float kUnit = specattn::kUnit<e4m3_number>;
  static Zero zero(const void*) { return {}; }

  explicit Float8Codes(const void* p) : codes(static_cast<const e4m3_number*>(p)) {}
  void numbers(int chunk, Zero, V* to) const {
#pragma GCC unroll 8
    for (int i = 0; i < kChunkCodes / Isa::W; i += 2) {
      Isa::load_two_units(codes + kChunkCodes * chunk + Isa::W * i, to + i);
    }
  }
  const e4m3_number* codes;
};

#ifdef SPECATTN_BF16
// Of bfloat16, which holds them as they are, in pairs; 64 at a time are looked up.
template <class Isa>
struct Float8Codes<Isa, 2> {
  struct Zero {};
  static constexpr float kUnit = 1.0f;
  static Zero zero(const void*) { return {}; }

  explicit Float8Codes(const void* p) {
    for (int i = 0; i < 2; ++i) {
      Bf16Of<e4m3>::load(static_cast<const char*>(p) + 64 * i, found + 2 * i);
    }
  }
  void numbers(int chunk, Zero, __m512* to) const { to[0] = found[chunk]; }
  __m512 found[4];
};
#endif

}  // namespace specattn
