// The one algorithm: packed query rows of some KV heads against a range of key blocks.
//
// A task reads each key once. For every block and head it multiplies all row tiles, so K and V come
// from memory once and from the caches for the other tiles. What remains is a State per head; the
// splits of a request are merged by finish.h in the order of the keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "address.h"
#include "convert.h"
#include "finish.h"
#include "kernels.h"
#include "rows.h"
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
      : a_(a),
        plan_(plan),
        task_(task),
        scratch_(scratch),
        states_(states),
        D_(static_cast<int>(a.D)),
        stride_(static_cast<int>(plan.stride)),
        rows_(task.rows.count * a.group()),
        few_(!kTiles<Isa, Elem> && rows_ <= kFewRows),
        logit_scale_(a.scale == 0 ? 1.0f : std::abs(a.scale)),
        scale_(a.softcap == 0 ? logit_scale_ : 1.0f),
        range_(a, task.b, task.head, task.rows) {}

  void run() {
    [[maybe_unused]] typename Isa::Tiles tiles;
    start_states();
    pack_queries();
    for (int64_t t = 0; a_.window && t < task_.rows.count; ++t) {
      starts_[t] = window_start(a_, task_.b, range_.length, task_.rows.first + t);
    }
    if (a_.collect == Collect::kScores) collect_start_ = collect_start(a_, task_.b, range_.length);
    if (task_.first_block == task_.last_block) return;
    Step steps[2];
    Step *now = &steps[0], *next = &steps[1];
    const int bytes = static_cast<int>(task_.heads * D_ * kRowBytes);
    load(*now, task_.first_block);
    for (int64_t index = task_.first_block; index < task_.last_block; ++index) {
      next->block.keys = 0;
      if (index + 1 < task_.last_block) load(*next, index + 1);
      const int64_t ahead = next->block.keys;
      for (int64_t head = 0; head < task_.heads; ++head) {
        if (head > 0) advance(*now);
        Prefetch lines(next->k, next->v, static_cast<int>(ahead * head / task_.heads),
                       static_cast<int>(ahead * (head + 1) / task_.heads), bytes);
        multiply(*now, head, lines);
      }
      std::swap(now, next);
    }
  }

 private:
  // A block of one head: what it is, who sees it and where its rows lie.
  struct Step {
    Block block;
    uint64_t words[kGroupRows];
    const char *k[kBlock + kKeyStep], *v[kBlock];
  };

  State state(int64_t head) const {
    return {states_ + head * State::floats(plan_.rows, stride_), plan_.rows, stride_};
  }

  void start_states() {
    for (int64_t head = 0; head < task_.heads; ++head) {
      const State s = state(head);
      std::fill(s.o, s.o + plan_.rows * stride_, 0.0f);
      std::fill(s.base, s.base + plan_.rows, -kInf);
      std::fill(s.sum, s.sum + plan_.rows, 0.0f);
    }
  }

  // Per head and tile [unit][row], or [row][unit] of few rows; what does not exist is zero. A query
  // carries the sign of the scale, so that the greatest product is the greatest logit.
  void pack_queries() {
    const int units = D_ / kPair;
    const int64_t g = a_.group();
    std::fill(scratch_.q, scratch_.q + task_.heads * plan_.rows * stride_, 0.0f);
    for (int64_t head = 0; head < task_.heads; ++head) {
      for (int64_t m = 0; m < rows_; ++m) {
        const Elem* q = reinterpret_cast<const Elem*>(
            row_of<Elem>(a_.q, task_.b, task_.rows.first + m / g, (task_.head + head) * g + m % g));
        const int64_t tile = m / kTile * kTile;
        float* to = queries(head, tile) + (few_ ? m * stride_ : m % kTile);
        const int64_t step = few_ ? 1 : tile_rows(tile);
        for (int u = 0; u < units; ++u) {
          if constexpr (kPair == 2) {
            uint32_t pair;
            std::memcpy(&pair, q + 2 * u, 4);
            if (a_.scale <= 0) pair = a_.scale < 0 ? pair ^ 0x80008000u : 0;
            std::memcpy(to + u * step, &pair, 4);
          } else {
            to[u * step] = a_.scale > 0 ? to_float(q[u]) : a_.scale < 0 ? -to_float(q[u]) : 0.0f;
          }
        }
      }
    }
  }

  float* queries(int64_t head, int64_t tile) const {
    return scratch_.q + (head * plan_.rows + tile) * stride_;
  }

  int64_t tile_rows(int64_t tile) const { return std::min<int64_t>(kTile, plan_.rows - tile); }

  void load(Step& step, int64_t index) const {
    Block& block = step.block;
    block.load(a_, task_.b, range_, task_.rows, index, starts_, step.words);
    if (!block.tree) {
      cached_rows<Elem>(a_.cache, task_.b, task_.head, block.first, block.keys, step.k, step.v);
    } else {
      tree_rows<Elem>(a_, task_.b, task_.head, block.first, block.keys, step.k, step.v);
    }
    for (int n = block.keys; n < kBlock + kKeyStep; ++n) step.k[n] = step.k[block.keys - 1];
    hide(step);
  }

  // On to the next head.
  void advance(Step& step) const {
    const bool apart = step.block.tree && !a_.tree.in_cache;
    const int64_t k = (apart ? a_.tree.k : a_.cache.k).head * kRowBytes;
    const int64_t v = (apart ? a_.tree.v : a_.cache.v).head * kRowBytes;
    for (int n = 0; n < kBlock + kKeyStep; ++n) step.k[n] += k;
    for (int n = 0; n < step.block.keys; ++n) step.v[n] += v;
    hide(step);
  }

  // Keys that no row sees may hold anything, NaN included: they are not read.
  static void hide(Step& step) {
    static const float nothing[kMaxHeadDim] = {};
    for (int n = 0; !step.block.full && n < step.block.keys; ++n) {
      if (step.block.seen >> n & 1) continue;
      step.k[n] = step.v[n] = reinterpret_cast<const char*>(nothing);
    }
  }

  void multiply(const Step& step, int64_t head, Prefetch& next) {
    const Block& block = step.block;
    const char* wide_keys[kBlock + kKeyStep];
    const char* const* k = step.k;
    if constexpr (kWidenKeys) {
      for (int n = 0; n < kBlock + kKeyStep; ++n) {
        float* row = scratch_.k + std::min(n, block.keys - 1) * stride_;
        if (n < block.keys) widen<Isa, Elem>(step.k[n], row, D_, stride_);
        if (n < block.keys) next.issue<Isa>(kScoreLines / 2);
        wide_keys[n] = reinterpret_cast<const char*>(row);
      }
      k = wide_keys;
    }
    const char* values[kBlock];
    if constexpr (kTiles<Isa, Elem>) next.pace(Isa::ticks(plan_.rows, step.block.keys, D_));
    prepare_values(step, values, next);
    const bool collects = plan_.collect != Collect::kNone && !block.tree;
    if (collects) std::fill(scores_, scores_ + kBlock, 0.0f);
    if (few_) {
      multiply_rows(step, head, k, values, next, collects);
    } else if constexpr (kTiles<Isa, Elem>) {
      multiply_matrix(step, head, next, collects);
    } else {
      multiply_tiles(step, head, k, values, next, collects);
    }
    if (collects && plan_.collect == Collect::kScores) store_scores(block, head);
  }

  void multiply_tiles(const Step& step, int64_t head, const char* const* k,
                      const char* const* values, Prefetch& next, bool collects) {
    const Block& block = step.block;
    const State state = this->state(head);
    const int units = static_cast<int>(ceil_div(block.keys, kPair));
    for (int64_t tile = 0; tile < plan_.rows; tile += kTile) {
      const int rows = static_cast<int>(tile_rows(tile));
      if (!block.full && !tile_mask(step, tile, rows)) continue;
      score_tile<Isa, Dot>(queries(head, tile), rows, k, block.keys, D_ / kPair, scratch_.s, next);
      if (a_.softcap != 0) cap_logits<Isa>(scratch_.s, rows, block.keys, logit_scale_, a_.softcap);
      if (collects) collect(block, head, tile, rows, {scratch_.s, 1, kTile});
      if (!block.full) mask_logits<Isa>(scratch_.s, rows, block.keys, mask_);
      softmax_tile<Isa, Dot>(scratch_.s, rows, block.keys, scale_, state.base + tile,
                             state.sum + tile, scratch_.decay, scratch_.p);
      const int used = static_cast<int>(std::min<int64_t>(rows, rows_ - tile));
      value_tile<Isa, Dot>({scratch_.p, 1, kTile}, used, values, units, scratch_.decay,
                           state.o + tile * stride_, stride_, next);
    }
  }

  void multiply_rows(const Step& step, int64_t head, const char* const* k,
                     const char* const* values, Prefetch& next, bool collects) {
    const Block& block = step.block;
    const State state = this->state(head);
    const int rows = static_cast<int>(rows_), units = static_cast<int>(ceil_div(block.keys, kPair));
    score_rows<Isa, Dot>(queries(head, 0), stride_, rows, k, block.keys, D_ / kPair, scratch_.s,
                         next);
    if (a_.softcap != 0) {
      const int keys = static_cast<int>(round_up(block.keys, Isa::W));
      cap_logits<Isa>(scratch_.s, keys, rows, logit_scale_, a_.softcap);
    }
    if (collects) collect(block, head, 0, rows, {scratch_.s, kBlock, 1});
    const uint64_t all = ~uint64_t{0} >> (kBlock - block.keys);
    for (int m = 0; m < rows; ++m) {
      const uint64_t visible = block.full ? all : step.words[m / a_.group()];
      softmax_row<Isa, Dot>(scratch_.s + m * kBlock, block.keys, visible, scale_, state.base + m,
                            state.sum + m, scratch_.decay + m, scratch_.p + m * kBlock);
    }
    value_tile<Isa, Dot>({scratch_.p, kBlock, 1}, rows, values, units, scratch_.decay, state.o,
                         stride_, next);
  }

  // In tiles of a matrix unit.
  void multiply_matrix(const Step& step, int64_t head, Prefetch& next, bool collects) {
    const Block& block = step.block;
    const State state = this->state(head);
    const int products = static_cast<int>(round_up(block.keys, Isa::kDepth));
    const int depth = static_cast<int>(round_up(D_, Isa::kDepth));
    const int pairs = static_cast<int>(ceil_div(block.keys, 2));
    std::fill(scratch_.v + pairs * stride_, scratch_.v + products / 2 * stride_, 0.0f);
    const StridedRows keys = matrix_keys(step);
    for (int64_t tile = 0; tile < plan_.rows; tile += kTile) {
      const int rows = static_cast<int>(tile_rows(tile));
      if (!block.full && !tile_mask(step, tile, rows)) continue;
      float* const s = scratch_.s;
      const int whole = static_cast<int>(round_up(block.keys, Isa::kEdge));
      Isa::score_tile(queries(head, tile), rows, keys, whole, depth, s, next);
      if (a_.softcap != 0) cap_logits<Isa>(s, rows, block.keys, logit_scale_, a_.softcap);
      if (collects) collect(block, head, tile, rows, {s, 1, kTile});
      if (!block.full) mask_logits<Isa>(s, rows, block.keys, mask_);
      std::fill(s + block.keys * kTile, s + products * kTile, -kInf);
      for (int row = 0; row < rows; row += Isa::W) {
        if (Isa::softmax_columns(s + row, products, scale_, state.base + tile + row,
                                 state.sum + tile + row, scratch_.decay + row,
                                 scratch_.p + row * (kBlock / 2), next)) {
          decay(state.o + (tile + row) * stride_, scratch_.decay + row);
        }
      }
      Isa::value_tile(scratch_.p, rows, scratch_.v, products / 2, state.o + tile * stride_, stride_,
                      next);
    }
  }

  // As they lie in the cache where that is possible and they are read once.
  StridedRows matrix_keys(const Step& step) const {
    const int64_t apart = step.k[1] - step.k[0];
    bool direct = plan_.rows <= kTile && step.block.keys == kBlock && D_ % Isa::kDepth == 0;
    for (int n = 2; direct && n < kBlock; ++n) direct = step.k[n] - step.k[n - 1] == apart;
    if (direct) return {step.k[0], apart};
    Isa::copy_keys(step.k, step.block.keys, D_, scratch_.k);
    return {reinterpret_cast<const char*>(scratch_.k), round_up(D_, Isa::kDepth) * kRowBytes};
  }

  void decay(float* o, const float* by) const {
    for (int r = 0; r < Isa::W; ++r) {
      const auto keep = Isa::set1(by[r]);
      for (int d = 0; d < stride_; d += Isa::W) {
        Isa::store(o + r * stride_ + d, Isa::mul(Isa::load(o + r * stride_ + d), keep));
      }
    }
  }

  // Units of value rows: as they lie in the cache where that is possible.
  void prepare_values(const Step& step, const char** values, Prefetch& next) {
    const int keys = step.block.keys;
    if constexpr (kPair == 2) {
      static const Elem nothing[kMaxHeadDim] = {};
      for (int n = 0; n < keys; n += 2) {
        const char* odd = n + 1 < keys ? step.v[n + 1] : reinterpret_cast<const char*>(nothing);
        float* row = scratch_.v + n / 2 * stride_;
        next.template tick<Isa>(1);
        Dot::pair_rows(reinterpret_cast<const Elem*>(step.v[n]), reinterpret_cast<const Elem*>(odd),
                       row, D_);
        values[n / 2] = reinterpret_cast<const char*>(row);
      }
    } else {
      const bool direct = std::is_same_v<Elem, float> && D_ == stride_;
      for (int n = 0; n < keys; ++n) {
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

  // Hands out the logits that the caller asked for: of rows from `tile` on, lying as `logits` says.
  void collect(const Block& block, int64_t head, int64_t tile, int rows, Weights logits) {
    const int64_t g = a_.group();
    const bool mean = plan_.collect == Collect::kScores;
    alignas(64) float share[kTile] = {};
    const float part = scale_ / static_cast<float>(a_.num_collect * g);
    for (int64_t i = 0; i < a_.num_collect; ++i) {
      const int64_t t = a_.collect_rows[i] - task_.rows.first;
      const int64_t first = std::max(t * g - tile, int64_t{0});
      const int64_t last = std::min<int64_t>((t + 1) * g - tile, rows);
      for (int64_t m = first; m < last; ++m) {
        share[m] += part;
        if (mean) continue;
        const int64_t q_head = (task_.head + head) * g + m + tile - t * g;
        store_logits(block, i, t, q_head, logits, m);
      }
    }
    if (mean && few_) add_rows(share, rows, logits.p);
    if (mean && !few_) add_columns(share, rows, logits.p);
  }

  void add_rows(const float* share, int rows, const float* s) {
    for (int m = 0; m < rows; ++m) {
      const auto w = Isa::set1(share[m]);
      for (int n = 0; share[m] != 0 && n < kBlock; n += Isa::W) {
        const auto sum = Isa::fma(w, Isa::load(s + m * kBlock + n), Isa::load(scores_ + n));
        Isa::store(scores_ + n, sum);
      }
    }
  }

  void add_columns(const float* share, int rows, const float* s) {
    int used[kTile / Isa::W], count = 0;  // vectors of rows that take part
    for (int j = 0; j < rows; j += Isa::W) {
      if (std::any_of(share + j, share + j + Isa::W, [](float x) { return x != 0; })) {
        used[count++] = j;
      }
    }
    for (int n = 0; count > 0 && n < kBlock; n += Isa::W) {
      typename Isa::V part[Isa::W];
      for (int i = 0; i < Isa::W; ++i) {
        const float* at = s + (n + i) * kTile;
        part[i] = Isa::mul(Isa::load(share + used[0]), Isa::load(at + used[0]));
        for (int u = 1; u < count; ++u) {
          part[i] = Isa::fma(Isa::load(share + used[u]), Isa::load(at + used[u]), part[i]);
        }
      }
      Isa::store(scores_ + n, Isa::add(Isa::load(scores_ + n), Isa::sum_each(part)));
    }
  }

  void store_logits(const Block& block, int64_t i, int64_t t, int64_t q_head, Weights logits,
                    int64_t m) const {
    alignas(64) float row[kBlock] = {};
    const float* s = logits.p + m * logits.row_step;
    for (int n = 0; n < block.keys; ++n) row[n] = s[n * logits.unit_step];
    const auto scale = Isa::set1(scale_);
    for (int n = 0; n < block.keys; n += Isa::W) {
      Isa::store(row + n, Isa::mul(Isa::load(row + n), scale));
    }
    const int64_t hidden = a_.window ? starts_[t] - block.first : 0;
    if (hidden > 0) std::fill(row, row + std::min<int64_t>(hidden, block.keys), -kInf);
    bf16* to = static_cast<bf16*>(a_.collected) + task_.b * a_.collected_batch +
               i * a_.collected_row + q_head * a_.collected_head + block.first;
    narrow<Isa>(row, to, block.keys);
  }

  // A key that some collected row does not see keeps its -inf.
  void store_scores(const Block& block, int64_t head) const {
    float* to = static_cast<float*>(a_.collected) + task_.b * a_.collected_batch +
                (task_.head + head) * a_.collected_head + block.first;
    for (int64_t n = std::max<int64_t>(collect_start_ - block.first, 0); n < block.keys; ++n) {
      to[n] = plan_.row_groups > 1 ? to[n] + scores_[n] : scores_[n];
    }
  }

  const Attention& a_;
  const Plan& plan_;
  const Task& task_;
  const Scratch scratch_;
  float* const states_;
  const int D_, stride_;
  const int64_t rows_;  // packed query rows of a head that exist; plan_.rows with padding
  const bool few_;      // rows.h, not tile.h
  const float logit_scale_, scale_;  // of products before and after a softcap
  const KeyRange range_;
  int64_t starts_[kGroupRows];
  int64_t collect_start_ = 0;  // first position that all collected rows see
  TileMask mask_;
  alignas(64) float scores_[kBlock];
};

}  // namespace specattn
