// merge_state and merge_states: softmax-weighted sum of attention states.
#pragma once

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "finish.h"
#include "kernels.h"

namespace specattn {

constexpr int kAtOnce = 4;

// to = from + sum of weights[s] * states[s], and rounded to `out` where that is given.
template <class Isa, class Elem>
inline void weighted_sum(const Elem* const* states, const float* weights, int count, int D,
                         const float* from, float* to, Elem* out) {
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) {
    auto acc = from ? Isa::load(from + d) : Isa::zero();
    for (int s = 0; s < count; ++s) {
      acc = Isa::fma(Isa::load_as_float(states[s] + d), Isa::set1(weights[s]), acc);
    }
    if (out) {
      Isa::store_as(out + d, acc);
    } else {
      Isa::store(to + d, acc);
    }
  }
  for (; d < D; ++d) {
    float acc = from ? from[d] : 0.0f;
    for (int s = 0; s < count; ++s) acc += to_float(states[s][d]) * weights[s];
    if (out) out[d] = from_float<Elem>(acc);
    to[d] = acc;
  }
}

// Rows [first, last) of the B * T * H rows.
template <class Isa, class Elem>
void merge(const Merge& p, int64_t first, int64_t last) {
  const int D = static_cast<int>(p.D);
  const bool apart = p.outs[1].data != nullptr;
  float row[kMaxHeadDim], weights[kAtOnce];
  const Elem* states[kAtOnce];
  for (int64_t i = first; i < last; ++i) {
    const int64_t b = i / (p.T * p.H), t = i / p.H % p.T, h = i % p.H;
    const auto lse = [&](int64_t s) {
      const int64_t* stride = p.lse_strides[apart ? s : 0];
      const float x = p.lses[apart ? s : 0][(apart ? 0 : s * p.lse_state) + b * stride[0] +
                                            t * stride[1] + h * stride[2]];
      return x == kInf ? -kInf : x;  // an empty state in the notation of some others
    };
    float top = -kInf, sum = 0.0f;
    for (int64_t s = 0; s < p.states; ++s) top = std::max(top, lse(s));
    const float base = top == -kInf ? 0.0f : top;
    for (int64_t s = 0; s < p.states; ++s) sum += std::exp(lse(s) - base);
    Elem* out = static_cast<Elem*>(p.out) + b * p.out_batch + t * p.out_row + h * p.out_head;
    int count = 0;
    bool first_states = true;
    const auto add = [&](bool last_states) {
      weighted_sum<Isa>(states, weights, count, D, first_states ? nullptr : row, row,
                        last_states ? out : nullptr);
      first_states = false;
      count = 0;
    };
    for (int64_t s = 0; s < p.states; ++s) {
      if (lse(s) == -kInf) continue;
      if (count == kAtOnce) add(false);
      const Rows& rows = p.outs[apart ? s : 0];
      states[count] = static_cast<const Elem*>(rows.data) + (apart ? 0 : s * p.out_state) +
                      b * rows.outer + t * rows.token + h * rows.head;
      weights[count++] = std::exp(lse(s) - base) / sum;
    }
    add(true);
    p.lse[b * p.lse_batch + t * p.lse_row + h * p.lse_head] =
        top == -kInf ? -kInf : base + std::log(sum);
  }
}

}  // namespace specattn
