// Products of tiles by tiles, nothing loaded or stored between them.
#pragma once

#include "full_registers.h"
#include "isa_amx.h"

namespace specattn {

template <class Elem>
struct AmxFullTiles {
  static constexpr int kSums = 4;
  static constexpr int64_t kOperations = 2 * kSums * amx::kEdge * amx::kEdge * amx::kDepth;

  static void multiply(int64_t rounds) {
    constexpr int64_t kTile = amx::kEdge * amx::kDepth;
    alignas(64) Elem numbers[4 * kTile];
    fill_operands<Amx>(numbers, 4 * kTile);
    const amx::Session session;
    amx::zero_all<kSums>();
    amx::load<4>(numbers, 64), amx::load<5>(numbers + kTile, 64);
    amx::load<6>(numbers + 2 * kTile, 64), amx::load<7>(numbers + 3 * kTile, 64);
    for (int64_t round = 0; round < rounds; ++round) {
      amx::multiply<Elem, 0, 4, 6>(), amx::multiply<Elem, 1, 4, 7>();
      amx::multiply<Elem, 2, 5, 6>(), amx::multiply<Elem, 3, 5, 7>();
    }
  }
};

template <>
struct FullRegisters<Amx, bf16> : AmxFullTiles<bf16> {};
template <>
struct FullRegisters<AmxFp16, fp16> : AmxFullTiles<fp16> {};

}  // namespace specattn
