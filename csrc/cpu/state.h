// The running softmax of a tile. Per row: the running maximum m, the running sum l of the weights
// exp(logit - m), and the factor alpha that rescales what was accumulated under an earlier m.
#pragma once

#include "math.h"
#include "types.h"

namespace specattn {

// Visible bits of a block for the rows of a tile, split so that a lane tests one 32-bit word.
struct TileMask {
  uint32_t low[kTile], high[kTile];
};

// m follows the greatest logit only when it is left this far behind: then accumulators are hardly
// ever rescaled, and weights up to e^5 lose no digit.
constexpr float kSlack = 5.0f;

// Where looking for the greatest logit costs more than it saves, m stays until some keys together
// weigh more than this. Only a weight of 1, that of m itself, is exact in bfloat16: with more slack
// a key that outweighs all others would more often be rounded.
constexpr float kMostWeight = 256.0f;

// Some rows of `count` logits, `stride` apart.
template <class Isa>
inline void cap_logits(float* s, int count, int rows, int stride, float scale, float softcap) {
  const auto cap = Isa::set1(softcap), inverse = Isa::set1(scale / softcap);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < count; i += Isa::W) {
      float* at = s + row * stride + i;
      Isa::store(at, Isa::mul(cap, tanh<Isa>(Isa::mul(Isa::load(at), inverse))));
    }
  }
}

// Of keys that begin with the block's key `first`.
template <class Isa>
inline void mask_logits(float* s, int rows, int first, int keys, const TileMask& mask) {
  const auto never = Isa::set1(-kInf);
  for (int n = first; n < first + keys; ++n) {
    const uint32_t* words = n < 32 ? mask.low : mask.high;
    for (int j = 0; j < rows; j += Isa::W) {
      float* at = s + (n - first) * kTile + j;
      Isa::store(at, Isa::select(Isa::bit(words + j, n & 31), Isa::load(at), never));
    }
  }
}

constexpr float kLog2e = 1.44269504f;

// Weights exp(scale * logit - pivot), as powers of two.
template <class Isa, bool rough>
struct Weigh {
  typename Isa::V scale, shift;

  Weigh(float scale, typename Isa::V pivot)
      : scale(Isa::set1(scale * kLog2e)), shift(Isa::mul(pivot, Isa::set1(-kLog2e))) {}

  typename Isa::V operator()(typename Isa::V logit) const {
    return exp2<Isa, rough>(Isa::fma(logit, scale, shift));
  }
};

// The step of the running maximum that all rows of a vector take together.
template <class Isa>
struct RunningMax {
  typename Isa::V m, pivot, alpha;  // pivot is subtracted from logits: m, or 0 while that is -inf

  // `top` is the greatest logit of a block, before its scale.
  RunningMax(typename Isa::V before, typename Isa::V top, float scale) {
    top = Isa::mul(top, Isa::set1(scale));
    m = Isa::select(Isa::less(Isa::add(before, Isa::set1(kSlack)), top), top, before);
    // A row that has seen no key yet keeps -inf; exp(-inf - 0) is the zero that it should weigh.
    pivot = Isa::select(Isa::less(Isa::set1(-kInf), m), m, Isa::zero());
    alpha = exp<Isa>(Isa::sub(before, pivot));
  }
};

// Turns logits s[key][row] / scale into weights p[unit][row] and updates m, l and alpha. Weights
// that are pairs may be multiplied by `factors` of their keys.
template <class Isa, class Dot>
inline void softmax_tile(const float* s, int rows, int keys, float scale, float* m, float* l,
                         float* alpha, float* p, const float* factors) {
  using V = typename Isa::V;
  for (int j = 0; j < rows; j += Isa::W) {
    V top = Isa::set1(-kInf), other = top;  // two chains: a maximum waits for the last
    for (int i = 0; i < keys; i += 2) {
      top = Isa::max(Isa::load(s + i * kTile + j), top);
      if (i + 1 < keys) other = Isa::max(Isa::load(s + (i + 1) * kTile + j), other);
    }
    const RunningMax<Isa> step(Isa::load(m + j), Isa::max(top, other), scale);
    const Weigh<Isa, Dot::kPair == 2> weigh(scale, step.pivot);
    const auto weight_of = [&](int n) { return weigh(Isa::load(s + n * kTile + j)); };
    V total = Isa::zero();  // per block first: error then grows with blocks, not with keys
    int n = 0;
    if constexpr (Dot::kPair == 2) {
      for (; n + 1 < keys; n += 2) {
        V a = weight_of(n);
        V b = weight_of(n + 1);
        total = Isa::add(total, Isa::add(a, b));
        if (factors) {
          a = Isa::mul(a, Isa::set1(factors[n])), b = Isa::mul(b, Isa::set1(factors[n + 1]));
        }
        Isa::store(p + n / 2 * kTile + j, Dot::pair(a, b));
      }
      if (n < keys) {
        V a = weight_of(n);
        total = Isa::add(total, a);
        if (factors) a = Isa::mul(a, Isa::set1(factors[n]));
        Isa::store(p + n / 2 * kTile + j, Dot::pair(a, Isa::zero()));
      }
    } else {
      for (; n < keys; ++n) {
        const V a = weight_of(n);
        total = Isa::add(total, a);
        Isa::store(p + n * kTile + j, a);
      }
    }
    Isa::store(m + j, step.m);
    Isa::store(l + j, Isa::fma(Isa::load(l + j), step.alpha, total));
    Isa::store(alpha + j, step.alpha);
  }
}

}  // namespace specattn
