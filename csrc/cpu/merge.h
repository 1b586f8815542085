// merge_state and merge_states: softmax-weighted sum of attention states.
#pragma once

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "kernels.h"
#include "math.h"

namespace specattn {

constexpr int kStatesAtOnce = 4;  // summed in registers
constexpr int kHeadsAtOnce = 16;  // of a token: their weights are computed side by side

// The sum of weights[s] * states[s], after `from` where that is given: to `out`, or else to `to`.
template <class Isa, class Elem, int N>
inline void weighted_sum(const Elem* const* states, const float* weights, int D, const float* from,
                         float* to, Elem* out) {
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) {
    auto acc = from ? Isa::load(from + d) : Isa::zero();
#pragma GCC unroll 4
    for (int s = 0; s < N; ++s) {
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
    for (int s = 0; s < N; ++s) acc += to_float(states[s][d]) * weights[s];
    if (out) {
      out[d] = from_float<Elem>(acc);
    } else {
      to[d] = acc;
    }
  }
}

// Log-sum-exps of `count` heads in one state. An empty state is -inf, in some notations +inf.
inline void load_lse(const Merge& p, int64_t s, int64_t b, int64_t t, int64_t head, int count,
                     float* lse) {
  const bool apart = p.outs[1].data != nullptr;
  const int64_t* stride = p.lse_strides[apart ? s : 0];
  const float* from = p.lses[apart ? s : 0] + (apart ? 0 : s * p.lse_state) + b * stride[0] +
                      t * stride[1] + head * stride[2];
  for (int h = 0; h < count; ++h) {
    const float x = from[h * stride[2]];
    lse[h] = x == kInf ? -kInf : x;
  }
}

template <class Isa, class Elem>
void merge_heads(const Merge& p, int64_t b, int64_t t, int64_t head, int count) {
  constexpr decltype(&weighted_sum<Isa, Elem, 0>) kSum[] = {
      weighted_sum<Isa, Elem, 0>, weighted_sum<Isa, Elem, 1>, weighted_sum<Isa, Elem, 2>,
      weighted_sum<Isa, Elem, 3>, weighted_sum<Isa, Elem, 4>};
  const int D = static_cast<int>(p.D);
  const bool apart = p.outs[1].data != nullptr;
  alignas(64) float lses[kStatesAtOnce][kHeadsAtOnce] = {}, weights[kStatesAtOnce][kHeadsAtOnce];
  alignas(64) float m[kHeadsAtOnce] = {}, l[kHeadsAtOnce] = {}, rows[kHeadsAtOnce][kMaxHeadDim];
  float* const lse = lses[0];
  const auto unnormalized = [&](const float* lse, int h) {
    return exp<Isa>(Isa::sub(Isa::load(lse + h), Isa::load(m + h)));
  };
  std::fill(m, m + count, -kInf);
  for (int64_t s = 0; s < p.states; ++s) {
    load_lse(p, s, b, t, head, count, lse);
    for (int h = 0; h < count; ++h) m[h] = std::max(m[h], lse[h]);
  }
  for (int h = 0; h < count; ++h) m[h] = m[h] == -kInf ? 0.0f : m[h];
  for (int64_t s = 0; s < p.states; ++s) {
    load_lse(p, s, b, t, head, count, lse);
    for (int h = 0; h < kHeadsAtOnce; h += Isa::W) {
      Isa::store(l + h, Isa::add(Isa::load(l + h), unnormalized(lse, h)));
    }
  }
  for (int64_t first = 0; first < p.states; first += kStatesAtOnce) {
    const int states = static_cast<int>(std::min<int64_t>(kStatesAtOnce, p.states - first));
    const bool last = first + states == p.states;
    for (int s = 0; s < states; ++s) {
      load_lse(p, first + s, b, t, head, count, lses[s]);
      for (int h = 0; h < kHeadsAtOnce; h += Isa::W) {
        Isa::store(weights[s] + h, Isa::div(unnormalized(lses[s], h), Isa::load(l + h)));
      }
    }
    for (int h = 0; h < count; ++h) {
      const Elem* from[kStatesAtOnce];
      float share[kStatesAtOnce];
      int used = 0;
      for (int s = 0; s < states; ++s) {
        if (lses[s][h] == -kInf) continue;  // what an empty state holds may be anything
        const Rows& outs = p.outs[apart ? first + s : 0];
        from[used] = static_cast<const Elem*>(outs.data) + (apart ? 0 : (first + s) * p.out_state) +
                     b * outs.outer + t * outs.token + (head + h) * outs.head;
        share[used++] = weights[s][h];
      }
      Elem* out =
          static_cast<Elem*>(p.out) + b * p.out_batch + t * p.out_row + (head + h) * p.out_head;
      kSum[used](from, share, D, first > 0 ? rows[h] : nullptr, rows[h], last ? out : nullptr);
    }
  }
  float* to = p.lse + b * p.lse_batch + t * p.lse_row + head * p.lse_head;
  for (int h = 0; h < count; ++h) {
    to[h * p.lse_head] = l[h] == 0 ? -kInf : m[h] + std::log(l[h]);
  }
}

// Tokens [first, last) of all requests.
template <class Isa, class Elem>
void merge(const Merge& p, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    for (int64_t head = 0; head < p.H; head += kHeadsAtOnce) {
      const int count = static_cast<int>(std::min<int64_t>(kHeadsAtOnce, p.H - head));
      merge_heads<Isa, Elem>(p, i / p.T, i % p.T, head, count);
    }
  }
}

}  // namespace specattn
