// What stands between the products and attentions of a layer: few bytes, but many steps.
#pragma once

#include <cmath>

#include "convert.h"
#include "kernels.h"
#include "quantise.h"

namespace specattn {

// out = x / rms(x) * weight over `n` elements; out may be x.
template <class Isa, class Elem>
inline void norm_row(const Elem* x, const Elem* weight, float eps, int64_t n, Elem* out) {
  auto squares = Isa::zero();
  float rest = 0;
  int64_t i = 0;
  for (; i + Isa::W <= n; i += Isa::W) {
    const auto v = Isa::load_as_float(x + i);
    squares = Isa::fma(v, v, squares);
  }
  for (; i < n; ++i) rest += to_float(x[i]) * to_float(x[i]);
  const float mean = (Isa::sum(squares) + rest) / static_cast<float>(n);
  const float inverse = 1.0f / std::sqrt(mean + eps);
  const auto factor = Isa::set1(inverse);
  for (i = 0; i + Isa::W <= n; i += Isa::W) {
    const auto v = Isa::mul(Isa::load_as_float(x + i), factor);
    Isa::store_as(out + i, Isa::mul(v, Isa::load_as_float(weight + i)));
  }
  for (; i < n; ++i) out[i] = from_float<Elem>(to_float(x[i]) * inverse * to_float(weight[i]));
}

// Turns the first 2 `half` elements: the first half of them against the second.
template <class Isa, class Elem>
inline void rotate_row(Elem* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + Isa::W <= half; i += Isa::W) {
    const auto a = Isa::load_as_float(x + i), b = Isa::load_as_float(x + half + i);
    const auto c = Isa::load(cos + i), s = Isa::load(sin + i);
    Isa::store_as(x + i, Isa::sub(Isa::mul(a, c), Isa::mul(b, s)));
    Isa::store_as(x + half + i, Isa::fma(b, c, Isa::mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    x[i] = from_float<Elem>(a * cos[i] - b * sin[i]);
    x[half + i] = from_float<Elem>(b * cos[i] + a * sin[i]);
  }
}

template <class Isa, class Elem>
void rms_norm(const RmsNorm& p, int64_t row) {
  norm_row<Isa>(static_cast<const Elem*>(p.x) + row * p.x_row, static_cast<const Elem*>(p.weight),
                p.eps, p.H, static_cast<Elem*>(p.out) + row * p.out_row);
}

template <class Isa, class Elem>
void rotate_heads(const RotateHeads& p, int64_t b, int64_t t) {
  Elem* const heads = static_cast<Elem*>(p.heads) + b * p.batch + t * p.row;
  const int64_t position = p.prefix[b] + p.depth(b, t);
  const float *cos = p.cos + position * p.table_row, *sin = p.sin + position * p.table_row;
  for (int64_t h = 0; h < p.Hq + p.Hk; ++h) {
    Elem* const x = heads + h * p.head;
    const void* norm = h < p.Hq ? p.q_norm : p.k_norm;
    if (norm) norm_row<Isa>(x, static_cast<const Elem*>(norm), p.eps, p.D, x);
    rotate_row<Isa>(x, cos, sin, p.half);
  }
  if (!p.k_cache.data) return;
  for (int64_t h = 0; h < 2 * p.Hk; ++h) {
    store_head(p, heads + (p.Hq + h) * p.head, h < p.Hk, b, p.slot(b, t), h % p.Hk);
  }
}

}  // namespace specattn
