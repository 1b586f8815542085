// The running softmax of a tile: per row the greatest logit, the sum of weights, and the decay of
// what was accumulated under an earlier maximum.
#pragma once

#include "math.h"
#include "types.h"

namespace specattn {

// Visible bits of a block for the rows of a tile, split so that a lane tests one 32-bit word.
struct TileMask {
  uint32_t low[kTile], high[kTile];
};

template <class Isa>
inline void cap_logits(float* s, int rows, int keys, float softcap) {
  const auto cap = Isa::set1(softcap), inverse = Isa::set1(1.0f / softcap);
  for (int n = 0; n < keys; ++n) {
    for (int j = 0; j < rows; j += Isa::W) {
      float* at = s + n * kTile + j;
      Isa::store(at, Isa::mul(cap, tanh<Isa>(Isa::mul(Isa::load(at), inverse))));
    }
  }
}

template <class Isa>
inline void mask_logits(float* s, int rows, int keys, const TileMask& mask) {
  const auto never = Isa::set1(-kInf);
  for (int n = 0; n < keys; ++n) {
    const uint32_t* words = n < 32 ? mask.low : mask.high;
    for (int j = 0; j < rows; j += Isa::W) {
      float* at = s + n * kTile + j;
      Isa::store(at, Isa::select(Isa::bit(words + j, n & 31), Isa::load(at), never));
    }
  }
}

template <class Isa, class Dot>
inline typename Isa::V weight(typename Isa::V x) {
  return Dot::kPair == 2 ? exp_rough<Isa>(x) : exp<Isa>(x);
}

// Turns logits s[key][row] into weights p[unit][row] and updates greatest, sum and decay.
template <class Isa, class Dot>
inline void softmax_tile(const float* s, int rows, int keys, float* greatest, float* sum,
                         float* decay, float* p) {
  using V = typename Isa::V;
  for (int j = 0; j < rows; j += Isa::W) {
    const V before = Isa::load(greatest + j);
    V top = before;
    for (int n = 0; n < keys; ++n) top = Isa::max(Isa::load(s + n * kTile + j), top);
    // A row that has seen no key yet keeps -inf; exp(-inf - 0) is the zero that it should weigh.
    const V base = Isa::select(Isa::less(Isa::set1(-kInf), top), top, Isa::zero());
    const V keep = exp<Isa>(Isa::sub(before, base));
    V total = Isa::zero();  // per block first: error then grows with blocks, not with keys
    int n = 0;
    if constexpr (Dot::kPair == 2) {
      for (; n + 1 < keys; n += 2) {
        const V a = weight<Isa, Dot>(Isa::sub(Isa::load(s + n * kTile + j), base));
        const V b = weight<Isa, Dot>(Isa::sub(Isa::load(s + (n + 1) * kTile + j), base));
        total = Isa::add(total, Isa::add(a, b));
        Isa::store(p + n / 2 * kTile + j, Dot::pair(a, b));
      }
      if (n < keys) {
        const V a = weight<Isa, Dot>(Isa::sub(Isa::load(s + n * kTile + j), base));
        total = Isa::add(total, a);
        Isa::store(p + n / 2 * kTile + j, Dot::pair(a, Isa::zero()));
      }
    } else {
      for (; n < keys; ++n) {
        const V a = weight<Isa, Dot>(Isa::sub(Isa::load(s + n * kTile + j), base));
        total = Isa::add(total, a);
        Isa::store(p + n * kTile + j, a);
      }
    }
    Isa::store(greatest + j, top);
    Isa::store(sum + j, Isa::fma(Isa::load(sum + j), keep, total));
    Isa::store(decay + j, keep);
  }
}

}  // namespace specattn
