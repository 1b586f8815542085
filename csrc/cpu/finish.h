// Merges the states of a task's splits, adds the sinks, and writes out and lse.
#pragma once

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "kernels.h"
#include "rows.h"

namespace specattn {

// Rounds a row of floats to elements; D is a multiple of 8.
template <class Isa, class Elem>
inline void narrow(const float* row, Elem* to, int D) {
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) Isa::store_as(to + d, Isa::load(row + d));
  for (; d < D; ++d) to[d] = from_float<Elem>(row[d]);
}

template <class Isa, class Elem>
void finish(const Attention& a, const Plan& plan, const Task& task, const float* states,
            int64_t split_stride) {
  const int64_t g = a.group();
  const int stride = static_cast<int>(plan.v_stride), Dv = static_cast<int>(a.Dv);
  [[maybe_unused]] const bool few = takes_rows<Isa, Elem>(a, task.rows.count * g);
  float row[kMaxValueDim];
  for (int64_t head = 0; head < task.heads; ++head) {
    for (int64_t r = 0; r < task.rows.count * g; ++r) {
      const int64_t t = task.rows.first + r / g, q_head = (task.head + head) * g + r % g;
      const auto state = [&](int64_t split) {
        const float* at = states + split * split_stride + head * State::floats(plan.rows, stride);
        return State(const_cast<float*>(at), plan.rows, stride);
      };
      float m = a.sinks ? a.sinks[q_head] : -kInf;
      for (int64_t s = 0; s < plan.splits; ++s) m = std::max(m, state(s).m[r]);
      const float pivot = m == -kInf ? 0.0f : m;
      float l = a.sinks ? std::exp(a.sinks[q_head] - pivot) : 0.0f;
      for (int64_t s = 0; s < plan.splits; ++s) {
        l += std::exp(state(s).m[r] - pivot) * state(s).l[r];
      }
      std::fill(row, row + stride, 0.0f);
      for (int64_t s = 0; s < plan.splits; ++s) {
        const float weight = std::exp(state(s).m[r] - pivot) / l;
        if (state(s).l[r] == 0) continue;  // saw no key; of one that is NaN l is NaN, m is not
        const auto w = Isa::set1(weight);
        const float* acc = state(s).acc + r * stride;
        for (int d = 0; d < stride; d += Isa::W) {
          Isa::store(row + d, Isa::fma(Isa::load(acc + d), w, Isa::load(row + d)));
        }
      }
      if constexpr (kTiles<Isa, Elem>) {
        if (!few) Isa::straighten(row, Dv);
      }
      Elem* out =
          static_cast<Elem*>(a.out) + task.b * a.out_batch + t * a.out_row + q_head * a.out_head;
      narrow<Isa>(row, out, Dv);
      a.lse[task.b * a.lse_batch + t * a.lse_row + q_head * a.lse_head] =
          l == 0 ? -kInf : pivot + std::log(l);
    }
  }
}

}  // namespace specattn
