// The one algorithm: packed query rows of some KV heads against a range of key blocks.
//
// A task reads each key once. For every block and head it multiplies all row tiles, so K and V come
// from memory once and from the caches for the other tiles. What remains is a State per head; the
// splits of a request are merged by finish.h in the order of the keys.
#pragma once

#include <algorithm>
#include <utility>

#include "address.h"
#include "convert.h"
#include "kernels.h"
#include "state.h"
#include "tile.h"
#include "visibility.h"

namespace specattn {

// Copies an element row to floats, padded with zeros to `stride`.
template <class Isa, class Elem>
inline void widen(const char* row, float* to, int D, int stride) {
  const Elem* from = reinterpret_cast<const Elem*>(row);
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) Isa::store(to + d, Isa::load_as_float(from + d));
  for (; d < stride; ++d) to[d] = d < D ? to_float(from[d]) : 0.0f;
}

template <class Isa, class Elem>
class Attend {
  using Dot = typename Isa::template Dot<Elem>;
  static constexpr int kPair = Dot::kPair;
  static constexpr bool kWidenKeys = kPair == 1 && !std::is_same_v<Elem, float>;
  static constexpr int64_t kRowBytes = sizeof(Elem);

 public:
  Attend(const Attention& a, const Plan& plan, const Task& task, float* states, Scratch scratch)
      : a_(a), plan_(plan), task_(task), scratch_(scratch), states_(states),
        D_(static_cast<int>(a.D)), stride_(static_cast<int>(plan.stride)),
        rows_(task.rows.count * a.group()), range_(a, task.b, task.head, task.rows) {}

  void run() {
    start_states();
    pack_queries();
    for (int64_t t = 0; a_.window && t < task_.rows.count; ++t) {
      starts_[t] = window_start(a_, task_.b, range_.length, task_.rows.first + t);
    }
    if (task_.first_block == task_.last_block) return;
    Step steps[2];
    Step *now = &steps[0], *next = &steps[1];
    load(*now, task_.first_block, task_.head);
    for (int64_t index = task_.first_block; index < task_.last_block; ++index) {
      for (int64_t head = 0; head < task_.heads; ++head) {
        const bool same_block = head + 1 < task_.heads;
        const int64_t next_index = same_block ? index : index + 1;
        const bool more = next_index < task_.last_block;
        if (more) load(*next, next_index, task_.head + (same_block ? head + 1 : 0));
        multiply(*now, head, more ? next : nullptr);
        std::swap(now, next);
      }
    }
  }

 private:
  // A block of one head: what it is, who sees it and where its rows lie.
  struct Step {
    Block block;
    uint64_t words[kGroupRows];
    const char* k[kBlock + kKeyStep];
    const char* v[kBlock + kKeyStep];
  };

  State state(int64_t head) const {
    return {states_ + head * State::floats(plan_.rows, stride_), plan_.rows, stride_};
  }

  void start_states() {
    for (int64_t head = 0; head < task_.heads; ++head) {
      const State s = state(head);
      std::fill(s.o, s.o + plan_.rows * stride_, 0.0f);
      std::fill(s.greatest, s.greatest + plan_.rows, -kInf);
      std::fill(s.sum, s.sum + plan_.rows, 0.0f);
    }
  }

  // Per head and tile [unit][row]; rows beyond the last are zero.
  void pack_queries() {
    const int units = D_ / kPair;
    const int64_t g = a_.group();
    for (int64_t head = 0; head < task_.heads; ++head) {
      for (int64_t m = 0; m < plan_.rows; ++m) {
        float* to = queries(head, m / kTile * kTile) + m % kTile;
        const int64_t width = tile_rows(m / kTile * kTile);
        if (m >= rows_) {
          for (int u = 0; u < units; ++u) to[u * width] = 0.0f;
          continue;
        }
        const Elem* q = reinterpret_cast<const Elem*>(
            row_of<Elem>(a_.q, task_.b, task_.rows.first + m / g, (task_.head + head) * g + m % g));
        for (int u = 0; u < units; ++u) {
          if constexpr (kPair == 2) {
            std::memcpy(to + u * width, q + 2 * u, 4);
          } else {
            to[u * width] = to_float(q[u]);
          }
        }
      }
    }
  }

  float* queries(int64_t head, int64_t tile) const {
    return scratch_.q + (head * plan_.rows + tile) * (D_ / kPair);
  }

  int64_t tile_rows(int64_t tile) const { return std::min<int64_t>(kTile, plan_.rows - tile); }

  void load(Step& step, int64_t index, int64_t head) const {
    static const float nothing[kMaxHeadDim] = {};
    Block& block = step.block;
    block.load(a_, task_.b, range_, task_.rows, index, starts_, step.words);
    if (!block.tree) {
      cached_rows<Elem>(a_.cache, task_.b, head, block.first, block.keys, step.k, step.v);
    } else {
      tree_rows<Elem>(a_, task_.b, head, block.first, block.keys, step.k, step.v);
    }
    // Keys that no row sees may hold anything, NaN included: they are not read.
    for (int n = 0; !block.full && n < block.keys; ++n) {
      if (!(block.seen >> n & 1)) step.k[n] = step.v[n] = reinterpret_cast<const char*>(nothing);
    }
    for (int n = block.keys; n < kBlock + kKeyStep; ++n) step.k[n] = step.k[block.keys - 1];
  }

  void multiply(const Step& step, int64_t head, const Step* next) {
    const Block& block = step.block;
    const int bytes = static_cast<int>(D_ * kRowBytes);
    Prefetch next_k, next_v;
    if (next) {
      next_k = {next->k, next->block.keys, bytes};
      next_v = {next->v, next->block.keys, bytes};
    }
    const char* wide_keys[kBlock + kKeyStep];
    const char* const* k = step.k;
    if constexpr (kWidenKeys) {
      for (int n = 0; n < kBlock + kKeyStep; ++n) {
        float* row = scratch_.k + std::min(n, block.keys - 1) * stride_;
        if (n < block.keys) widen<Isa, Elem>(step.k[n], row, D_, stride_);
        if (n < block.keys) next_k.issue<Isa>(n, 1);
        wide_keys[n] = reinterpret_cast<const char*>(row);
      }
      next_k.count = 0;
      k = wide_keys;
    }
    const char* values[kBlock];
    prepare_values(step, values, next_v);
    const State state = this->state(head);
    const bool collects = plan_.collect != Collect::kNone && !block.tree;
    if (collects) std::fill(scores_, scores_ + block.keys, 0.0f);
    for (int64_t tile = 0; tile < plan_.rows; tile += kTile) {
      const int rows = static_cast<int>(tile_rows(tile));
      if (!block.full && !tile_mask(step, tile, rows)) continue;
      score_tile<Isa, Dot>(queries(head, tile), rows, k, block.keys, D_ / kPair, a_.scale,
                           scratch_.s, next_k);
      next_k.count = 0;
      if (a_.softcap != 0) cap_logits<Isa>(scratch_.s, rows, block.keys, a_.softcap);
      if (collects) collect(block, head, tile, rows);
      if (!block.full) mask_logits<Isa>(scratch_.s, rows, block.keys, mask_);
      softmax_tile<Isa, Dot>(scratch_.s, rows, block.keys, state.greatest + tile, state.sum + tile,
                             scratch_.decay, scratch_.p);
      const int used = static_cast<int>(std::min<int64_t>(rows, rows_ - tile));
      value_tile<Isa, Dot>(scratch_.p, used, values, static_cast<int>(ceil_div(block.keys, kPair)),
                           scratch_.decay, state.o + tile * stride_, stride_);
    }
    if (collects && plan_.collect == Collect::kScores) store_scores(block, head);
  }

  // Units of value rows: as they lie in the cache where that is possible.
  void prepare_values(const Step& step, const char** values, const Prefetch& next) {
    const int keys = step.block.keys;
    if constexpr (kPair == 2) {
      static const Elem nothing[kMaxHeadDim] = {};
      for (int n = 0; n < keys; n += 2) {
        next.issue<Isa>(n, 2);
        const char* odd = n + 1 < keys ? step.v[n + 1] : reinterpret_cast<const char*>(nothing);
        float* row = scratch_.v + n / 2 * stride_;
        Dot::pair_rows(reinterpret_cast<const Elem*>(step.v[n]),
                       reinterpret_cast<const Elem*>(odd), row, D_);
        values[n / 2] = reinterpret_cast<const char*>(row);
      }
    } else {
      const bool direct = std::is_same_v<Elem, float> && D_ == stride_;
      for (int n = 0; n < keys; ++n) {
        next.issue<Isa>(n, 1);
        values[n] = step.v[n];
        if (direct) continue;
        float* row = scratch_.v + n * stride_;
        widen<Isa, Elem>(step.v[n], row, D_, stride_);
        values[n] = reinterpret_cast<const char*>(row);
      }
    }
  }

  // Spreads the words of the rows over the lanes of a tile; false where nothing is visible.
  bool tile_mask(const Step& step, int64_t tile, int rows) {
    uint64_t any = 0;
    const int64_t g = a_.group();
    for (int i = 0; i < rows; ++i) {
      const uint64_t word = tile + i < rows_ ? step.words[(tile + i) / g] : 0;
      mask_.low[i] = static_cast<uint32_t>(word);
      mask_.high[i] = static_cast<uint32_t>(word >> 32);
      any |= word;
    }
    return any != 0;
  }

  // Hands out the logits of a tile that the caller asked for.
  void collect(const Block& block, int64_t head, int64_t tile, int rows) {
    const int64_t g = a_.group();
    const float weight = 1.0f / static_cast<float>(a_.num_collect * g);
    for (int64_t i = 0; i < a_.num_collect; ++i) {
      const int64_t t = a_.collect_rows[i] - task_.rows.first;
      const int64_t first = std::max(t * g - tile, int64_t{0});
      const int64_t last = std::min<int64_t>((t + 1) * g - tile, rows);
      for (int64_t m = first; m < last; ++m) {
        const float* s = scratch_.s + m;
        if (plan_.collect == Collect::kLogits) {
          store_logits(block, i, t, (task_.head + head) * g + m + tile - t * g, s);
        } else {
          for (int n = 0; n < block.keys; ++n) scores_[n] += weight * s[n * kTile];
        }
      }
    }
  }

  void store_logits(const Block& block, int64_t i, int64_t t, int64_t q_head, const float* s) const {
    bf16* to = static_cast<bf16*>(a_.collected) + task_.b * a_.collected_batch +
               i * a_.collected_row + q_head * a_.collected_head + block.first;
    const int64_t hidden = a_.window ? starts_[t] - block.first : 0;
    for (int n = 0; n < block.keys; ++n) {
      to[n] = from_float<bf16>(n < hidden ? -kInf : s[n * kTile]);
    }
  }

  // A key that some collected row does not see keeps its -inf.
  void store_scores(const Block& block, int64_t head) const {
    float* to = static_cast<float*>(a_.collected) + task_.b * a_.collected_batch +
                (task_.head + head) * a_.collected_head + block.first;
    for (int n = 0; n < block.keys; ++n) to[n] += scores_[n];
  }

  const Attention& a_;
  const Plan& plan_;
  const Task& task_;
  const Scratch scratch_;
  float* const states_;
  const int D_, stride_;
  const int64_t rows_;  // packed query rows of a head that exist; plan_.rows with padding
  const KeyRange range_;
  int64_t starts_[kGroupRows];
  TileMask mask_;
  float scores_[kBlock];
};

}  // namespace specattn
