// Mean logits of K: mean_i(q_i . k) = (mean_i q_i) . k, so one float query scores a key, whatever
// the number of rows and heads that it stands for.
#pragma once

#include <algorithm>

#include "address.h"
#include "convert.h"
#include "kernels.h"

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

constexpr int kStreams = 4;  // keys at a time, far apart: memory serves several readers faster

// scores[r] = q . k[r], while rows that come later are on their way.
template <class Isa, class Elem>
inline void dot_keys(const char* const* k, const char* const* later, int64_t offset, const float* q,
                     int D, float* scores) {
  using V = typename Isa::V;
  const Elem* row[kStreams];
  V acc[kStreams];
#pragma GCC unroll 4
  for (int r = 0; r < kStreams; ++r) {
    row[r] = reinterpret_cast<const Elem*>(k[r] + offset);
    acc[r] = Isa::zero();
  }
  constexpr int size = sizeof(Elem);
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) {
    const V x = Isa::load(q + d);
#pragma GCC unroll 4
    for (int r = 0; r < kStreams; ++r) {
      acc[r] = Isa::fma(Isa::load_as_float(row[r] + d), x, acc[r]);
      if (d * size % 64 == 0) __builtin_prefetch(later[r] + offset + d * size);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kStreams; ++r) {
    float rest = 0.0f;
    for (int e = d; e < D; ++e) rest += to_float(row[r][e]) * q[e];
    scores[r] = Isa::sum(acc[r]) + rest;
  }
}

// Scores positions [first, last) of a request, whose cache holds `Elem`; beyond its length they are
// -inf.
template <class Isa, class Elem>
void importance(const Importance& p, int64_t b, int64_t first, int64_t last, const float* means) {
  const int64_t length = p.cache.lengths[b * p.cache.lengths_batch];
  const int keys = static_cast<int>(std::clamp(length, first, last) - first);
  const int D = static_cast<int>(p.D);
  float* out = p.scores + b * p.scores_batch + first;
  for (int64_t h = 0; h < (p.per_head ? p.Hk : 1); ++h) {
    float* head = out + h * p.scores_head;
    std::fill(head + keys, head + last - first, -kInf);
  }
  const char *k[kImportanceChunk], *v[kImportanceChunk];
  cached_rows(p.cache, b, 0, first, keys, k, v);
  const bool scaled = p.cache.scaled();
  const char *scale[kImportanceChunk], *unused[kImportanceChunk];
  if (scaled) scale_rows(p.cache, b, 0, first, keys, scale, unused);
  // Heads that lie together are read token by token, in the order of addresses.
  const int64_t step = p.cache.k.head * static_cast<int64_t>(sizeof(Elem));
  const int64_t group = p.cache.k.head * p.Hk <= p.cache.k.token ? p.Hk : 1;
  const int ahead =
      static_cast<int>(tuning.key_ahead / (group * D * static_cast<int64_t>(sizeof(Elem)))) + 1;
  const int apart = keys / kStreams;
  for (int64_t head = 0; head < p.Hk; head += group) {
    for (int n = 0; n * kStreams < keys; ++n) {
      const char *row[kStreams], *later[kStreams];
      int at[kStreams];
      const int count = n < apart ? kStreams : keys % kStreams;
      for (int r = 0; r < kStreams; ++r) {
        at[r] = n < apart ? n + r * apart : n * kStreams + std::min(r, count - 1);
        row[r] = k[at[r]];
        later[r] = k[std::min(at[r] + ahead, keys - 1)];
      }
      for (int64_t h = head; h < head + group; ++h) {
        float scores[kStreams];
        dot_keys<Isa, Elem>(row, later, h * step, means + h * D, D, scores);
        for (int r = 0; scaled && r < count; ++r) {
          float factor;
          std::memcpy(&factor, scale[at[r]] + h * p.cache.k_scale.head * sizeof factor,
                      sizeof factor);
          scores[r] *= factor;
        }
        float* to = out + h * p.scores_head;
        const bool adds = !p.per_head && h > 0;
        for (int r = 0; r < count; ++r) to[at[r]] = adds ? to[at[r]] + scores[r] : scores[r];
      }
    }
  }
}

}  // namespace specattn
