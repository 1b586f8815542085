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
  // Blocks of a step: a matrix unit loads and stores its sums once for all of them.
  static constexpr int kBlocks = kTiles<Isa, Elem> ? kMostKeys / kBlock : 1;
  static constexpr int kKeys = kBlocks * kBlock;

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
        few_(rows_ <= kFewRows<Isa, Elem>),
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
    for (int64_t index = task_.first_block; index < task_.last_block;) {
      index += now->count;
      next->keys = 0;
      if (index < task_.last_block) load(*next, index);
      const int64_t ahead = next->keys;
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
  // Blocks of one head: what they are, who sees them and where their rows lie.
  struct Step {
    int count, keys;
    Block blocks[kBlocks];
    uint64_t words[kBlocks][kGroupRows];
    const char *k[kKeys + kKeyStep], *v[kKeys];
    int64_t k_apart, v_apart;  // bytes from row to row where that is always the same, else 0
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

  // Per head and tile [unit][row], or [row][D] of few rows; what does not exist is zero. A query
  // carries the sign of the scale, so that the greatest product is the greatest logit.
  void pack_queries() {
    const int64_t g = a_.group();
    std::fill(scratch_.q, scratch_.q + task_.heads * plan_.rows * stride_, 0.0f);
    for (int64_t head = 0; head < task_.heads; ++head) {
      for (int64_t m = 0; m < rows_; ++m) {
        const Elem* q = reinterpret_cast<const Elem*>(
            row_of<Elem>(a_.q, task_.b, task_.rows.first + m / g, (task_.head + head) * g + m % g));
        const int64_t tile = m / kTile * kTile;
        float* to = queries(head, tile) + (few_ ? m * stride_ : m % kTile);
        const int64_t step = few_ ? 1 : tile_rows(tile);
        if (kPair == 1 || few_) {
          for (int d = 0; d < D_; ++d) {
            to[d * step] = a_.scale > 0 ? to_float(q[d]) : a_.scale < 0 ? -to_float(q[d]) : 0.0f;
          }
          continue;
        }
        for (int u = 0; u < D_ / 2; ++u) {
          uint32_t pair;
          std::memcpy(&pair, q + 2 * u, 4);
          if (a_.scale <= 0) pair = a_.scale < 0 ? pair ^ 0x80008000u : 0;
          std::memcpy(to + u * step, &pair, 4);
        }
      }
    }
  }

  float* queries(int64_t head, int64_t tile) const {
    return scratch_.q + (head * plan_.rows + tile) * stride_;
  }

  int64_t tile_rows(int64_t tile) const { return std::min<int64_t>(kTile, plan_.rows - tile); }

  // Whole blocks of the prefix go together where rows are many; one of fewer keys, or of the tree,
  // goes alone.
  void load(Step& step, int64_t index) const {
    const int64_t whole = (range_.length - range_.start) / kBlock;
    const int64_t left = std::min(whole, task_.last_block) - index;
    step.count = static_cast<int>(std::clamp<int64_t>(left, 1, plan_.rows > kTile ? kBlocks : 1));
    step.keys = 0;
    for (int i = 0; i < step.count; ++i) {
      Block& block = step.blocks[i];
      block.load(a_, task_.b, range_, task_.rows, index + i, starts_, step.words[i]);
      const char **k = step.k + step.keys, **v = step.v + step.keys;
      if (!block.tree) {
        cached_rows<Elem>(a_.cache, task_.b, task_.head, block.first, block.keys, k, v);
      } else {
        tree_rows<Elem>(a_, task_.b, task_.head, block.first, block.keys, k, v);
      }
      step.keys += block.keys;
    }
    for (int n = step.keys; n < kKeys + kKeyStep; ++n) step.k[n] = step.k[step.keys - 1];
    hide(step);
    if constexpr (kTiles<Isa, Elem>) {
      step.k_apart = apart(step.k, step.keys);
      step.v_apart = apart(step.v, step.keys);
    }
  }

  static int64_t apart(const char* const* rows, int keys) {
    const int64_t bytes = rows[1] - rows[0];
    bool same = keys % kBlock == 0;
    for (int n = 2; n < keys; ++n) same &= rows[n] - rows[n - 1] == bytes;
    return same ? bytes : 0;
  }

  // On to the next head.
  void advance(Step& step) const {
    const bool apart = step.blocks[0].tree && !a_.tree.in_cache;
    const int64_t k = (apart ? a_.tree.k : a_.cache.k).head * kRowBytes;
    const int64_t v = (apart ? a_.tree.v : a_.cache.v).head * kRowBytes;
    for (int n = 0; n < kKeys + kKeyStep; ++n) step.k[n] += k;
    for (int n = 0; n < step.keys; ++n) step.v[n] += v;
    hide(step);
  }

  // Keys that no row sees may hold anything, NaN included: they are not read.
  static void hide(Step& step) {
    static const float nothing[kMaxHeadDim] = {};
    for (int i = 0; i < step.count; ++i) {
      const Block& block = step.blocks[i];
      for (int n = 0; !block.full && n < block.keys; ++n) {
        if (block.seen >> n & 1) continue;
        step.k[i * kBlock + n] = step.v[i * kBlock + n] = reinterpret_cast<const char*>(nothing);
      }
    }
  }

  void multiply(const Step& step, int64_t head, Prefetch& next) {
    const bool collects = plan_.collect != Collect::kNone && !step.blocks[0].tree;
    if (collects) std::fill(scores_, scores_ + step.keys, 0.0f);
    if (few_) {
      multiply_rows(step, head, next, collects);
    } else if constexpr (kTiles<Isa, Elem>) {
      multiply_matrix(step, head, next, collects);
    } else {
      multiply_tiles(step, head, next, collects);
    }
    for (int i = 0; collects && plan_.collect == Collect::kScores && i < step.count; ++i) {
      store_scores(step.blocks[i], head, scores_ + i * kBlock);
    }
  }

  void multiply_tiles(const Step& step, int64_t head, Prefetch& next, bool collects) {
    const Block& block = step.blocks[0];
    const char* wide_keys[kBlock + kKeyStep];
    const char* const* k = step.k;
    if constexpr (kWidenKeys) {
      for (int n = 0; n < kBlock + kKeyStep; ++n) {
        float* row = scratch_.k + std::min(n, step.keys - 1) * stride_;
        if (n < step.keys) widen<Isa, Elem>(step.k[n], row, D_, stride_);
        wide_keys[n] = reinterpret_cast<const char*>(row);
      }
      k = wide_keys;
    }
    const char* values[kBlock];
    prepare_values(step, values);
    const State state = this->state(head);
    const int units = static_cast<int>(ceil_div(block.keys, kPair));
    next.pace(tile_ticks<Isa>(plan_.rows, block.keys, D_ / kPair, units, stride_));
    for (int64_t tile = 0; tile < plan_.rows; tile += kTile) {
      const int rows = static_cast<int>(tile_rows(tile));
      if (!block.full && !tile_mask(step.words[0], tile, rows)) continue;
      score_tile<Isa, Dot>(queries(head, tile), rows, k, block.keys, D_ / kPair, scratch_.s, next);
      if (a_.softcap != 0) cap_logits<Isa>(scratch_.s, rows, block.keys, logit_scale_, a_.softcap);
      if (collects) collect(block, head, tile, rows, {scratch_.s, 1, kTile}, scores_);
      if (!block.full) mask_logits<Isa>(scratch_.s, rows, block.keys, mask_);
      softmax_tile<Isa, Dot>(scratch_.s, rows, block.keys, scale_, state.base + tile,
                             state.sum + tile, scratch_.decay, scratch_.p);
      const int used = static_cast<int>(std::min<int64_t>(rows, rows_ - tile));
      value_tile<Isa, Dot>({scratch_.p, 1, kTile}, used, values, units, scratch_.decay,
                           state.o + tile * stride_, stride_, next);
    }
  }

  void multiply_rows(const Step& step, int64_t head, Prefetch& next, bool collects) {
    const Block& block = step.blocks[0];
    const State state = this->state(head);
    const int rows = static_cast<int>(rows_);
    // As many ticks as keys that are passed: once for the scores, once for each range of columns.
    const int passes = 1 + static_cast<int>(ceil_div(D_, Isa::kValueCols * Isa::W));
    next.pace(static_cast<int>(ceil_div(rows, kRowGroup)) * passes * block.keys);
    score_rows<Isa, Elem>(queries(head, 0), stride_, rows, step.k, block.keys, D_, scratch_.s,
                          next);
    if (a_.softcap != 0) {
      const int keys = static_cast<int>(round_up(block.keys, Isa::W));
      cap_logits<Isa>(scratch_.s, keys, rows, logit_scale_, a_.softcap);
    }
    if (collects) collect(block, head, 0, rows, {scratch_.s, kBlock, 1}, scores_);
    const uint64_t all = ~uint64_t{0} >> (kBlock - block.keys);
    for (int m = 0; m < rows; ++m) {
      const uint64_t visible = block.full ? all : step.words[0][m / a_.group()];
      softmax_row<Isa>(scratch_.s + m * kBlock, block.keys, visible, scale_, state.base + m,
                       state.sum + m, scratch_.decay + m, scratch_.p + m * kBlock);
    }
    value_rows<Isa, Elem>(scratch_.p, rows, step.v, block.keys, scratch_.decay, state.o, stride_,
                          D_, next);
  }

  // In tiles of a matrix unit. Weights of several blocks wait for their values, unless the base
  // that they were taken from moves on.
  void multiply_matrix(const Step& step, int64_t head, Prefetch& next, bool collects) {
    next.pace(Isa::ticks(plan_.rows, step.keys, D_));
    const StridedRows keys = in_place(step.k, step.k_apart, step.keys, scratch_.k, next);
    const bool paired = plan_.rows > Isa::kDirectRows;
    StridedRows values = {reinterpret_cast<const char*>(scratch_.v), 4 * stride_};
    if (!paired) {
      values = in_place(step.v, step.v_apart, step.keys, scratch_.v, next);
    } else {
      Isa::pair_values(step.v, step.keys, D_, scratch_.v, stride_, next);
    }
    const State state = this->state(head);
    for (int64_t tile = 0; tile < plan_.rows; tile += kTile) {
      const int rows = static_cast<int>(tile_rows(tile));
      float* const o = state.o + tile * stride_;
      int first = 0, last = 0;  // keys whose weights wait
      const auto multiply_values = [&] {
        if (first < last) {
          Isa::value_tile(scratch_.p, rows, first, last, values, paired, o, stride_, next);
        }
        first = last;
      };
      for (int i = 0; i < step.count; ++i) {
        const Block& block = step.blocks[i];
        const int at = i * kBlock, products = static_cast<int>(round_up(block.keys, Isa::kDepth));
        if (!block.full && !tile_mask(step.words[i], tile, rows)) {
          multiply_values();
          first = last = at + products;
          continue;
        }
        score_matrix(step, i, head, tile, keys, next, collects);
        for (int row = 0; row < rows; row += Isa::W) {
          if (!Isa::move_base(scratch_.s + row, products, scale_, state.base + tile + row,
                              state.sum + tile + row, scratch_.decay)) {
            continue;
          }
          multiply_values();
          decay(o + row * stride_, scratch_.decay);
        }
        for (int row = 0; row < rows; row += Isa::W) {
          Isa::weigh(scratch_.s + row, products, scale_, state.base + tile + row,
                     state.sum + tile + row, scratch_.p, row, at, paired, next);
        }
        last = at + products;
      }
      multiply_values();
    }
  }

  // Logits of one block and tile of rows, as they go into the softmax.
  void score_matrix(const Step& step, int i, int64_t head, int64_t tile, StridedRows keys,
                    Prefetch& next, bool collects) {
    const Block& block = step.blocks[i];
    const int rows = static_cast<int>(tile_rows(tile));
    const int whole = static_cast<int>(round_up(block.keys, Isa::kEdge));
    const int products = static_cast<int>(round_up(block.keys, Isa::kDepth));
    const int depth = static_cast<int>(round_up(D_, Isa::kDepth));
    float* const s = scratch_.s;
    const StridedRows from = {keys.first + i * kBlock * keys.stride, keys.stride};
    Isa::score_tile(queries(head, tile), rows, from, whole, depth, s, next);
    if (a_.softcap != 0) cap_logits<Isa>(s, rows, block.keys, logit_scale_, a_.softcap);
    if (collects) collect(block, head, tile, rows, {s, 1, kTile}, scores_ + i * kBlock);
    if (!block.full) mask_logits<Isa>(s, rows, block.keys, mask_);
    std::fill(s + block.keys * kTile, s + products * kTile, -kInf);
  }

  // Rows of a cache for a matrix unit: as they lie where that is possible and they are read once.
  StridedRows in_place(const char* const* rows, int64_t apart, int keys, float* copy,
                       Prefetch& next) const {
    if (apart && plan_.rows <= kTile && D_ % Isa::kDepth == 0) return {rows[0], apart};
    Isa::copy_rows(rows, keys, D_, copy, next);
    return {reinterpret_cast<const char*>(copy), round_up(D_, Isa::kDepth) * kRowBytes};
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
  void prepare_values(const Step& step, const char** values) {
    const int keys = step.keys;
    if constexpr (kPair == 2) {
      static const Elem nothing[kMaxHeadDim] = {};
      for (int n = 0; n < keys; n += 2) {
        const char* odd = n + 1 < keys ? step.v[n + 1] : reinterpret_cast<const char*>(nothing);
        float* row = scratch_.v + n / 2 * stride_;
        Dot::pair_rows(reinterpret_cast<const Elem*>(step.v[n]), reinterpret_cast<const Elem*>(odd),
                       row, D_);
        values[n / 2] = reinterpret_cast<const char*>(row);
      }
    } else {
      for (int n = 0; n < keys; ++n) {
        float* row = scratch_.v + n * stride_;
        widen<Isa, Elem>(step.v[n], row, D_, stride_);
        values[n] = reinterpret_cast<const char*>(row);
      }
    }
  }

  // Spreads the words of the rows over the lanes of a tile; false where nothing is visible.
  bool tile_mask(const uint64_t* words, int64_t tile, int rows) {
    uint64_t any = 0;
    const int64_t g = a_.group();
    for (int i = 0; i < rows; ++i) {
      const uint64_t word = tile + i < rows_ ? words[(tile + i) / g] : 0;
      mask_.low[i] = static_cast<uint32_t>(word);
      mask_.high[i] = static_cast<uint32_t>(word >> 32);
      any |= word;
    }
    return any != 0;
  }

  // Hands out the logits that the caller asked for: of rows from `tile` on, lying as `logits` says;
  // their mean is added to `scores`.
  void collect(const Block& block, int64_t head, int64_t tile, int rows, Weights logits,
               float* scores) {
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
    if (mean && few_) add_rows(share, rows, logits.p, scores);
    if (mean && !few_) add_columns(share, rows, logits.p, scores);
  }

  void add_rows(const float* share, int rows, const float* s, float* scores) {
    for (int m = 0; m < rows; ++m) {
      const auto w = Isa::set1(share[m]);
      for (int n = 0; share[m] != 0 && n < kBlock; n += Isa::W) {
        const auto sum = Isa::fma(w, Isa::load(s + m * kBlock + n), Isa::load(scores + n));
        Isa::store(scores + n, sum);
      }
    }
  }

  void add_columns(const float* share, int rows, const float* s, float* scores) {
    int used[kTile / Isa::W], count = 0;  // vectors of rows that take part
    for (int j = 0; j < rows; j += Isa::W) {
      if (std::any_of(share + j, share + j + Isa::W, [](float x) { return x != 0; })) {
        used[count++] = j;
      }
    }
    for (int n = 0; count > 0 && n < kBlock; n += Isa::W) {
      if constexpr (kTiles<Isa, Elem>) Isa::stay_awake();
      typename Isa::V part[Isa::W];
      for (int i = 0; i < Isa::W; ++i) {
        const float* at = s + (n + i) * kTile;
        part[i] = Isa::mul(Isa::load(share + used[0]), Isa::load(at + used[0]));
        for (int u = 1; u < count; ++u) {
          part[i] = Isa::fma(Isa::load(share + used[u]), Isa::load(at + used[u]), part[i]);
        }
      }
      Isa::store(scores + n, Isa::add(Isa::load(scores + n), Isa::sum_each(part)));
    }
  }

  void store_logits(const Block& block, int64_t i, int64_t t, int64_t q_head, Weights logits,
                    int64_t m) const {
    if constexpr (kTiles<Isa, Elem>) Isa::stay_awake();
    alignas(64) float row[kBlock];
    const float* s = logits.p + m * logits.row_step;
    const auto scale = Isa::set1(scale_);
    for (int n = 0; n < block.keys; n += Isa::W) {
      const auto x = Isa::load_strided(s + n * logits.unit_step, logits.unit_step);
      Isa::store(row + n, Isa::mul(x, scale));
    }
    const int64_t hidden = a_.window ? starts_[t] - block.first : 0;
    if (hidden > 0) std::fill(row, row + std::min<int64_t>(hidden, block.keys), -kInf);
    bf16* to = static_cast<bf16*>(a_.collected) + task_.b * a_.collected_batch +
               i * a_.collected_row + q_head * a_.collected_head + block.first;
    expect_writes(to + kBlock, kBlock * sizeof(bf16));
    narrow<Isa>(row, to, block.keys);
  }

  // What the next block writes: stores go out in order, and one that waits for memory holds up all.
  static void expect_writes(const void* at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(static_cast<const char*>(at) + i, 1, 2);
    }
  }

  // A key that some collected row does not see keeps its -inf.
  void store_scores(const Block& block, int64_t head, const float* scores) const {
    float* to = static_cast<float*>(a_.collected) + task_.b * a_.collected_batch +
                (task_.head + head) * a_.collected_head + block.first;
    expect_writes(to + kBlock, kBlock * sizeof(float));
    for (int64_t n = std::max<int64_t>(collect_start_ - block.first, 0); n < block.keys; ++n) {
      to[n] = plan_.row_groups > 1 ? to[n] + scores[n] : scores[n];
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
  alignas(64) float scores_[kKeys];
};

}  // namespace specattn
