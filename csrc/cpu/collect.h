// Collects the logits of chosen rows, or their mean, on their way into the softmax.
#pragma once

#include <algorithm>
#include <utility>

#include "convert.h"
#include "packed.h"
#include "tile.h"

namespace specattn {

// Of a row and key, wherever the products left them.
struct Logits {
  const float* p;
  int row_step, unit_step;
};

template <class Isa, class Elem>
class Collector {
 public:
  // `starts` as in Keys.
  Collector(const PackedRows<Isa, Elem>& rows, const int64_t* starts)
      : rows_(rows), a_(rows.a), task_(rows.task), starts_(starts) {
    if (means()) start_ = collect_start(a_, task_.b, a_.length(task_.b, task_.head));
  }

  // Collects the prefix, never the tree.
  bool wants(const Block& block) const { return a_.collect != Collect::kNone && !block.tree; }

  // Before the first tile of a step's keys, and after the last one.
  void begin(int keys) {
    if (means()) std::fill(scores_, scores_ + keys, 0.0f);
  }
  void end(const Block& block, int at, int64_t head) const {
    if (means()) store_scores(block, scores_ + at, head);
  }

  // Some keys of a block, from the one at `at` of the step on, against the rows from `tile` on;
  // their logits lie as `logits` says.
  void add(const Block& block, int at, int keys, int64_t head, int64_t tile, Logits logits) {
    if (!means()) {
      store_logits(block.first + at % kBlock, keys, head, tile, logits);
      return;
    }
    if (tile != shared_tile_) share(tile);
    if (rows_.few) {
      add_rows(keys, logits.p, scores_ + at);
    } else {
      add_columns(keys, logits.p, scores_ + at);
    }
  }

 private:
  bool means() const { return a_.collect == Collect::kScores; }

  // The range of rows of a tile that the i-th collected row takes.
  std::pair<int64_t, int64_t> packed(int64_t i, int64_t tile) const {
    const int64_t g = a_.group(), first = (a_.collect_rows[i] - task_.rows.first) * g - tile;
    return {std::max<int64_t>(first, 0), std::min<int64_t>(first + g, rows_.tile_rows(tile))};
  }

  // What the rows of a tile contribute to a mean.
  void share(int64_t tile) {
    const int64_t heads = a_.per_head ? a_.group() : a_.Hq;
    const float part = rows_.scale / static_cast<float>(a_.num_collect * heads);
    std::fill(share_, share_ + kTile, 0.0f);
    for (int64_t i = 0; i < a_.num_collect; ++i) {
      const auto [from, to] = packed(i, tile);
      for (int64_t m = from; m < to; ++m) share_[m] += part;
    }
    used_ = 0;
    for (int j = 0; j < rows_.tile_rows(tile); j += Isa::W) {
      if (std::any_of(share_ + j, share_ + j + Isa::W, [](float x) { return x != 0; })) {
        use_[used_++] = j;
      }
    }
    shared_tile_ = tile;
  }

  void add_rows(int keys, const float* s, float* scores) const {
    for (int m = 0; m < rows_.count; ++m) {
      const auto w = Isa::set1(share_[m]);
      for (int n = 0; share_[m] != 0 && n < keys; n += Isa::W) {
        const auto sum = Isa::fma(w, Isa::load(s + m * kBlock + n), Isa::load(scores + n));
        Isa::store(scores + n, sum);
      }
    }
  }

  void add_columns(int keys, const float* s, float* scores) const {
    for (int n = 0; used_ > 0 && n < keys; n += Isa::W) {
      typename Isa::V part[Isa::W];
#pragma GCC unroll 16
      for (int i = 0; i < Isa::W; ++i) part[i] = Isa::zero();
      for (int u = 0; u < used_; ++u) {
        const auto share = Isa::load(share_ + use_[u]);
        const auto takes_part = Isa::less(Isa::zero(), share);  // another row may hold NaN
        const float* at = s + n * kTile + use_[u];
#pragma GCC unroll 16
        for (int i = 0; i < Isa::W; ++i, at += kTile) {
          part[i] = Isa::fma(share, Isa::select(takes_part, Isa::load(at), Isa::zero()), part[i]);
        }
      }
      Isa::store(scores + n, Isa::add(Isa::load(scores + n), Isa::sum_each(part)));
    }
  }

  // Of all collected rows in a tile; keys from `position` on.
  void store_logits(int64_t position, int keys, int64_t head, int64_t tile, Logits logits) const {
    const int64_t g = a_.group();
    for (int64_t i = 0; i < a_.num_collect; ++i) {
      const auto [from, to] = packed(i, tile);
      if (from >= to) continue;
      const int64_t t = a_.collect_rows[i] - task_.rows.first;
      const int64_t q_head = (task_.head + head) * g + tile - t * g;  // of row 0
      bf16* const row = static_cast<bf16*>(a_.collected) + task_.b * a_.collected_batch +
                        i * a_.collected_row + q_head * a_.collected_head + position;
      const int64_t hidden = a_.window ? starts_[t] - position : 0;
      for (int64_t m = from; m < to; m += 4) {
        const int count = static_cast<int>(std::min<int64_t>(to - m, 4));
        store_rows(logits, m, count, keys, hidden, row + m * a_.collected_head);
      }
    }
  }

  // Up to four rows with their scale; the first `hidden` keys are -inf.
  void store_rows(Logits logits, int64_t first, int count, int keys, int64_t hidden,
                  bf16* to) const {
    const auto scale = Isa::set1(rows_.scale);
    const float* from = logits.p + first * logits.row_step;
    for (int r = 0; r < count; ++r) {
      expect_writes(to + r * a_.collected_head + kBlock, keys * sizeof(bf16));
    }
    for (int n = 0; n < keys; n += Isa::W, from += Isa::W * logits.unit_step) {
      typename Isa::V x[4];
      if (count == 4 && logits.row_step == 1) {
        Isa::load_four_rows(from, logits.unit_step, x);
      } else {
        for (int r = 0; r < count; ++r) {
          x[r] = Isa::load_strided(from + r * logits.row_step, logits.unit_step);
        }
      }
      for (int r = 0; r < count; ++r) {
        bf16* const at = to + r * a_.collected_head + n;
        const auto y = Isa::mul(x[r], scale);
        if (hidden <= n && n + Isa::W <= keys) {
          Isa::store_as(at, y);
        } else {
          store_some(at, y, static_cast<int>(hidden - n), std::min<int>(keys - n, Isa::W));
        }
      }
    }
  }

  // Part of a vector, -inf up to `hidden`.
  static void store_some(bf16* to, typename Isa::V x, int hidden, int count) {
    float some[Isa::W];
    Isa::store(some, x);
    for (int i = 0; i < count; ++i) to[i] = from_float<bf16>(i < hidden ? -kInf : some[i]);
  }

  // What the next block writes: stores go out in order, and one that waits for memory holds up all.
  static void expect_writes(const void* at, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(static_cast<const char*>(at) + i, 1, 2);
    }
  }

  // A key that some collected row does not see keeps its -inf.
  void store_scores(const Block& block, const float* scores, int64_t head) const {
    float* to = static_cast<float*>(a_.collected) + task_.b * a_.collected_batch +
                (task_.head + head) * a_.collected_head + block.first;
    expect_writes(to + kBlock, kBlock * sizeof(float));
    for (int64_t n = std::max<int64_t>(start_ - block.first, 0); n < block.keys; ++n) {
      to[n] = rows_.plan.adds ? to[n] + scores[n] : scores[n];
    }
  }

  const PackedRows<Isa, Elem>& rows_;
  const Attention& a_;
  const Task& task_;
  const int64_t* const starts_;
  int64_t start_ = 0;  // first position that all collected rows see
  int64_t shared_tile_ = -1;
  int use_[kTile], used_ = 0;  // vectors of rows that take part
  alignas(64) float share_[kTile], scores_[kMostKeys];
};

}  // namespace specattn
