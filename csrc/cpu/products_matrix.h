// The products and the softmax of a step of keys and one head, in tiles of a matrix unit.
#pragma once

#include <algorithm>
#include <cmath>

#include "collect.h"
#include "keys.h"
#include "packed.h"
#include "state.h"

namespace specattn {

template <class Isa, class Elem>
class MatrixProducts {
 public:
  // Sums of values are loaded and stored once for so many.
  static constexpr int kBlocks = kMostKeys / kBlock;
  static constexpr bool kTakesStored = false;

  // Values of a few rows are taken as they lie, unless they were and have to be `paired` after all.
  MatrixProducts(const PackedRows<Isa, Elem>& rows, const int64_t* starts, bool paired)
      : rows_(rows),
        scratch_(rows.scratch),
        paired_(paired || !takes_values_as_they_lie(rows)),
        collects_(!paired),
        slice_(paired_ ? Isa::kDepth : kBlock),
        collector_(rows, starts) {}

  // Neighbours along D are multiplied together there, one by zero: a NaN or an infinity of one has
  // made a NaN of the other.
  static bool has_to_pair(const PackedRows<Isa, Elem>& rows) {
    if (!takes_values_as_they_lie(rows)) return false;
    const auto clean = Isa::zero();
    for (int64_t head = 0; head < rows.task.heads; ++head) {
      const State state = rows.state(head);
      auto sum = clean;
      for (int64_t i = 0; i < rows.count * rows.v_stride; i += Isa::W) {
        sum = Isa::fma(Isa::load(state.acc + i), clean, sum);
      }
      if (std::isnan(Isa::sum(sum))) return true;
    }
    return false;
  }

  void multiply(const Step<kBlocks>& step, int64_t head, Prefetch& prefetch) {
    const bool collects = collects_ && collector_.wants(step.blocks[0]);
    if (collects) collector_.begin(step.keys);
    prepare(step, prefetch);
    for (int64_t tile = 0; tile < rows_.plan.rows; tile += kTile) {
      multiply_tile(step, head, tile, prefetch);
    }
    for (int i = 0; collects && i < step.count; ++i) {
      collector_.end(step.blocks[i], i * kBlock, head);
    }
  }

 private:
  static bool takes_values_as_they_lie(const PackedRows<Isa, Elem>& rows) {
    return rows.plan.rows <= Isa::kDirectRows;
  }

  // Rows of K and V as they lie in the cache, where that is possible and they are read once.
  void prepare(const Step<kBlocks>& step, Prefetch& prefetch) {
    const int D = rows_.D, Dv = rows_.Dv;
    const bool k_lies = D % Isa::kDepth == 0 && step.k_apart && rows_.plan.rows <= kManyRows;
    const bool v_lies = Dv % Isa::kDepth == 0 && step.v_apart && !paired_;
    prefetch.pace(Isa::ticks(rows_.plan.rows, step.keys, (D + Dv) / 2) +
                  Isa::copy_ticks(step.keys) * (!k_lies + (!paired_ && !v_lies)));
    keys_ = k_lies ? StridedRows{step.k[0], step.k_apart}
                   : copy(step.k, step.keys, D, scratch_.k, prefetch);
    if (paired_) {
      Isa::pair_values(step.v, step.keys, Dv, scratch_.v, rows_.v_stride, prefetch);
      values_ = {reinterpret_cast<const char*>(scratch_.v), 4 * rows_.v_stride};
    } else {
      values_ = v_lies ? StridedRows{step.v[0], step.v_apart}
                       : copy(step.v, step.keys, Dv, scratch_.v, prefetch);
    }
  }

  StridedRows copy(const char* const* rows, int keys, int D, float* to, Prefetch& prefetch) const {
    Isa::copy_rows(rows, keys, D, to, prefetch);
    const int64_t bytes = round_up(D, Isa::kDepth) * static_cast<int64_t>(sizeof(Elem));
    return {reinterpret_cast<const char*>(to), bytes};
  }

  // Keys come in slices, so that their logits stay in the L1 cache. Their weights wait for the
  // values of the whole step, unless m moves on.
  void multiply_tile(const Step<kBlocks>& step, int64_t head, int64_t tile, Prefetch& prefetch) {
    const State state = rows_.state(head);
    const int rows = rows_.tile_rows(tile), stride = rows_.v_stride;
    float* const acc = state.acc + tile * stride;
    int first = 0, last = 0;  // keys whose weights wait
    const auto multiply_values = [&] {
      if (first < last) {
        Isa::template value_tile<Elem>(scratch_.p, rows, first, last, values_, paired_, acc, stride,
                                       prefetch);
      }
      first = last;
    };
    for (int i = 0; i < step.count; ++i) {
      const Block& block = step.blocks[i];
      const int begin = i * kBlock;
      const int end = begin + static_cast<int>(round_up(block.keys, Isa::kDepth));
      seen_ = rows_.seen(block, step.words[i], tile, mask_);
      if (seen_ == Seen::kNothing) {
        multiply_values();
        first = last = end;
        continue;
      }
      for (int at = begin; at < end; at += slice_) {
        const int keys = std::min(slice_, end - at);
        score(block, at, std::min(keys, begin + block.keys - at), keys, head, tile, prefetch);
        for (int row = 0; row < rows; row += Isa::W) {
          float *const m = state.m + tile + row, *const l = state.l + tile + row;
          const auto weigh = [&](bool may_fail) {
            return Isa::template weigh<Elem>(scratch_.s + row, keys, rows_.scale, m, l, scratch_.p,
                                             row, at, paired_, may_fail, prefetch);
          };
          if (Isa::all_seen(m) && weigh(true)) continue;
          if (Isa::raise_max(scratch_.s + row, keys, rows_.scale, m, l, scratch_.alpha)) {
            multiply_values();
            rescale(acc + row * stride, scratch_.alpha);
          }
          weigh(false);
        }
        last = at + keys;
      }
    }
    multiply_values();
  }

  // Logits of some keys of a block and a tile of rows, as they go into the softmax; those of keys
  // that do not exist, up to `padded`, weigh nothing.
  void score(const Block& block, int at, int keys, int padded, int64_t head, int64_t tile,
             Prefetch& prefetch) {
    const int rows = rows_.tile_rows(tile), whole = static_cast<int>(round_up(keys, Isa::kEdge));
    const int depth = static_cast<int>(round_up(rows_.D, Isa::kDepth));
    const StridedRows from = {keys_.first + at * keys_.stride, keys_.stride};
    float* const s = scratch_.s;
    Isa::template score_tile<Elem>(rows_.queries(head, tile), rows, from, whole, depth, s,
                                   prefetch);
    const Attention& a = rows_.a;
    if (a.softcap != 0) cap_logits<Isa>(s, rows, keys, kTile, rows_.logit_scale, a.softcap);
    if (collects_ && collector_.wants(block))
      collector_.add(block, at, keys, head, tile, {s, 1, kTile});
    if (seen_ == Seen::kSome) mask_logits<Isa>(s, rows, at % kBlock, keys, mask_);
    std::fill(s + keys * kTile, s + padded * kTile, -kInf);
  }

  void rescale(float* acc, const float* alpha) const {
    for (int r = 0; r < Isa::W; ++r) {
      const auto factor = Isa::set1(alpha[r]);
      for (int d = 0; d < rows_.v_stride; d += Isa::W) {
        float* const at = acc + r * rows_.v_stride + d;
        Isa::store(at, Isa::mul(Isa::load(at), factor));
      }
    }
  }

  const PackedRows<Isa, Elem>& rows_;
  const Scratch& scratch_;
  const bool paired_;    // rows of V are woven together in pairs
  const bool collects_;  // the first time only
  const int slice_;
  Collector<Isa, Elem> collector_;
  StridedRows keys_ = {}, values_ = {};
  TileMask mask_;
  Seen seen_ = Seen::kAll;  // of the block that is scored, by the rows of the tile
};

}  // namespace specattn
