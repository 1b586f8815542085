// Products of registers by registers, nothing loaded or stored: the rate that kernels are held
// against.
#pragma once

#include <type_traits>

#include "convert.h"
#include "types.h"

namespace specattn {

// Numbers that are neither zero nor alike: a processor is slower where bits change. One copy for
// each Isa: the linker keeps any one of those that are alike.
template <class Isa, class Elem>
void fill_operands(Elem* to, int64_t count) {
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525 + 1013904223;
    to[i] = from_float<Elem>(static_cast<float>(static_cast<int32_t>(state)) * 0x1p-32f);
  }
}

template <class Isa, class Elem>
struct FullRegisters {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  static constexpr int kSums = Isa::kScoreAccumulators;
  static constexpr int64_t kOperations = 2 * kSums * Isa::W * Dot::kPair;  // of a round

  static void multiply(int64_t rounds) {
    using Held = std::conditional_t<Dot::kPair == 1, float, Elem>;
    constexpr int kNumbers = (4 + kSums) * Isa::W * Dot::kPair;
    alignas(64) Held numbers[kNumbers];
    fill_operands<Isa>(numbers, kNumbers);
    const float* const at = reinterpret_cast<const float*>(numbers);
    const V a[2] = {Isa::load(at), Isa::load(at + Isa::W)};
    const V b[2] = {Isa::load(at + 2 * Isa::W), Isa::load(at + 3 * Isa::W)};
    V sums[kSums];  // each begins elsewhere: a compiler keeps one of those that are alike
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) sums[i] = Isa::load(at + (4 + i) * Isa::W);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
      for (int i = 0; i < kSums; ++i) {
        // A sum of floats is a factor as well, or a compiler would multiply a by b once for all.
        if constexpr (Dot::kPair == 1) {
          sums[i] = Dot::dot(a[i % 2], sums[i], b[i / 2 % 2]);
        } else {
          sums[i] = Dot::dot(sums[i], a[i % 2], b[i / 2 % 2]);
        }
      }
    }
    float kept[Isa::W];
    volatile float sink;  // keeps the products
    for (int i = 0; i < kSums; ++i) {
      Isa::store(kept, sums[i]);
      sink = kept[0];
    }
    static_cast<void>(sink);
  }
};

// Returns the operations of so many rounds.
template <class Isa, class Elem>
int64_t multiply_registers(int64_t rounds) {
  FullRegisters<Isa, Elem>::multiply(rounds);
  return rounds * FullRegisters<Isa, Elem>::kOperations;
}

}  // namespace specattn
