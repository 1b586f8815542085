// Mean logits of K: mean_i(q_i . k) = (mean_i q_i) . k, so one float query scores a key, whatever
// the number of rows and heads that it stands for.
#pragma once

#include <algorithm>

#include "address.h"
#include "convert.h"
#include "kernels.h"
#include "prefetch.h"

namespace specattn {

// Over rows and group, times scale (and over the KV heads where they share a score).
template <class Isa, class Elem>
void mean_query(const Importance& p, int64_t b, int64_t head, float* mean) {
  const int64_t g = p.Hq / p.Hk;
  const float weight = p.scale / static_cast<float>(g * p.T * (p.per_head ? 1 : p.Hk));
  std::fill(mean, mean + p.D, 0.0f);
  for (int64_t t = 0; t < p.T; ++t) {
    for (int64_t h = head * g; h < (head + 1) * g; ++h) {
      const Elem* q = reinterpret_cast<const Elem*>(row_of<Elem>(p.q, b, t, h));
      for (int64_t d = 0; d < p.D; ++d) mean[d] += to_float(q[d]);
    }
  }
  for (int64_t d = 0; d < p.D; ++d) mean[d] *= weight;
}

// Four keys at a time: their sums wait for each other's memory.
template <class Isa, class Elem>
inline void dot_keys(const char* const* k, const float* q, int D, float* scores) {
  using V = typename Isa::V;
  const Elem* row[4];
  V acc[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    row[r] = reinterpret_cast<const Elem*>(k[r]);
    acc[r] = Isa::zero();
  }
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) {
    const V x = Isa::load(q + d);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) acc[r] = Isa::fma(Isa::load_as_float(row[r] + d), x, acc[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    float rest = 0.0f;
    for (int e = d; e < D; ++e) rest += to_float(row[r][e]) * q[e];
    scores[r] = Isa::sum(acc[r]) + rest;
  }
}

// Scores positions [first, last) of a request; beyond its length they are -inf.
template <class Isa, class Elem>
void importance(const Importance& p, int64_t b, int64_t first, int64_t last, const float* means) {
  const int64_t length = p.cache.lengths[b * p.cache.lengths_batch], D = p.D;
  const int64_t end = std::clamp(length, first, last);
  float* out = p.scores + b * p.scores_batch;
  for (int64_t h = 0; h < (p.per_head ? p.Hk : 1); ++h) {
    std::fill(out + h * p.scores_head + end, out + h * p.scores_head + last, -kInf);
  }
  const char *k[2][kBlock + 4], *v[kBlock];
  const auto load = [&](int64_t at, int64_t h, const char** to) {
    const int keys = static_cast<int>(std::clamp<int64_t>(end - at, 0, kBlock));
    cached_rows<Elem>(p.cache, b, h, at, keys, to, v);
    for (int n = keys; keys > 0 && n < kBlock + 4; ++n) to[n] = to[keys - 1];
    return keys;
  };
  const int bytes = static_cast<int>(p.Hk * D * static_cast<int64_t>(sizeof(Elem)));
  int now = 0, keys = load(first, 0, k[0]);
  float block[kBlock + 4];
  for (int64_t at = first; at < end; at += kBlock) {
    const int next = load(at + kBlock, 0, k[1 - now]);
    Prefetch lines(k[1 - now], k[1 - now], 0, next, bytes);
    const int step = static_cast<int>(ceil_div(bytes, 64 * p.Hk) * 4);
    for (int64_t h = 0; h < p.Hk; ++h) {
      if (h > 0) load(at, h, k[now]);
      for (int n = 0; n < keys; n += 4) {
        lines.template issue<Isa>(step);
        dot_keys<Isa, Elem>(k[now] + n, means + h * D, static_cast<int>(D), block + n);
      }
      float* to = out + (p.per_head ? h * p.scores_head : 0) + at;
      const bool adds = !p.per_head && h > 0;
      for (int n = 0; n < keys; ++n) to[n] = adds ? to[n] + block[n] : block[n];
    }
    now = 1 - now;
    keys = next;
  }
}

}  // namespace specattn
