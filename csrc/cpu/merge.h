// merge_state and merge_states: softmax-weighted sum of attention states.
#pragma once

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "finish.h"
#include "kernels.h"

namespace specattn {

constexpr int kKept = 8;

// Rows [first, last) of the B * T * H rows.
template <class Isa, class Elem>
void merge(const Merge& p, int64_t first, int64_t last) {
  const int D = static_cast<int>(p.D);
  const bool apart = p.outs[1].data != nullptr;
  float row[kMaxHeadDim];
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
    float kept[kKept];  // an exp costs as much as a row
    const auto weight_of = [&](int64_t s) { return s < kKept ? kept[s] : std::exp(lse(s) - base); };
    for (int64_t s = 0; s < p.states; ++s) {
      const float weight = std::exp(lse(s) - base);
      if (s < kKept) kept[s] = weight;
      sum += weight;
    }
    const float share = 1.0f / sum;
    std::fill(row, row + round_up(D, kRowPadding), 0.0f);
    for (int64_t s = 0; s < p.states; ++s) {
      if (lse(s) == -kInf) continue;
      const Rows& rows = p.outs[apart ? s : 0];
      const Elem* o = static_cast<const Elem*>(rows.data) + (apart ? 0 : s * p.out_state) +
                      b * rows.outer + t * rows.token + h * rows.head;
      const float weight = weight_of(s) * share;
      const auto w = Isa::set1(weight);
      int d = 0;
      for (; d + Isa::W <= D; d += Isa::W) {
        Isa::store(row + d, Isa::fma(Isa::load_as_float(o + d), w, Isa::load(row + d)));
      }
      for (; d < D; ++d) row[d] += to_float(o[d]) * weight;
    }
    Elem* out = static_cast<Elem*>(p.out) + b * p.out_batch + t * p.out_row + h * p.out_head;
    narrow<Isa>(row, out, D);
    p.lse[b * p.lse_batch + t * p.lse_row + h * p.lse_head] =
        top == -kInf ? -kInf : base + std::log(sum);
  }
}

}  // namespace specattn
