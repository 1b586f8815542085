// A short causal convolution over a tree, channels side by side in vectors.
#pragma once

#include <algorithm>

#include "convert.h"
#include "kernels.h"
#include "linear_finish.h"
#include "recurrent.h"

namespace specattn {

// Channels [first, last) of the rows of a request.
template <class Isa, class Elem>
void causal_conv(const CausalConv& p, int64_t b, int64_t first, int64_t last) {
  using V = typename Isa::V;
  constexpr int W = Isa::W;
  const int64_t rows = p.tree.rows(b);
  const Elem* of[kMostNodes][kMostTaps];  // what each tap of each row meets, the oldest first
  for (int64_t i = 0; i < rows; ++i) {
    int64_t at = i;
    for (int64_t tap = p.K - 1; tap >= 0; --tap) {
      if (at >= 0) {
        of[i][tap] = p.x.template at<Elem>(p.tree, b, at);
        at = p.tree.parent(b, at);
        if (at < 0) at = -1;
      } else {  // -1 is the newest that was kept
        of[i][tap] =
            static_cast<const Elem*>(p.kept) + b * p.kept_batch + (p.K - 1 + at) * p.kept_row;
        --at;
      }
    }
  }
  for (int64_t c = first; c < last; c += W) {
    const int count = static_cast<int>(std::min<int64_t>(W, last - c));
    float taps[kMostTaps][W] = {};
    for (int n = 0; n < count; ++n) {
      const Elem* const from = static_cast<const Elem*>(p.weight) + (c + n) * p.weight_row;
      for (int64_t tap = 0; tap < p.K; ++tap) taps[tap][n] = to_float(from[tap]);
    }
    V weights[kMostTaps];
    for (int64_t tap = 0; tap < p.K; ++tap) weights[tap] = Isa::load(taps[tap]);
    const V bias =
        p.bias ? load_up_to<Isa>(static_cast<const Elem*>(p.bias) + c, count) : Isa::zero();
    for (int64_t i = 0; i < rows; ++i) {
      V sum = bias;
      for (int64_t tap = 0; tap < p.K; ++tap) {
        sum = Isa::fma(weights[tap], load_up_to<Isa>(of[i][tap] + c, count), sum);
      }
      const V active = activate<Isa>(p.activation, sum);
      store_up_to<Isa>(p.out.template out<Elem>(p.tree, b, i) + c, active, count);
    }
  }
}

}  // namespace specattn
