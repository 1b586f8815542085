// The products and the softmax of one block of keys and one head, with vectors.
#pragma once

#include <algorithm>

#include "collect.h"
#include "convert.h"
#include "keys.h"
#include "packed.h"
#include "state.h"
#include "tile.h"

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
class VectorProducts {
  using Dot = typename Isa::template Dot<Elem>;
  static constexpr int kPair = Dot::kPair;
  static constexpr bool kWidenKeys = kPair == 1 && !std::is_same_v<Elem, float>;

 public:
  static constexpr int kBlocks = 1;

  VectorProducts(const PackedRows<Isa, Elem>& rows, const int64_t* starts)
      : rows_(rows), collector_(rows, starts) {}

  void multiply(const Step<kBlocks>& step, int64_t head, Prefetch& prefetch) {
    const bool collects = collector_.wants(step.blocks[0]);
    if (collects) collector_.begin(step.keys);
    multiply_tiles(step, head, prefetch);
    if (collects) collector_.end(step.blocks[0], 0, head);
  }

 private:
  void multiply_tiles(const Step<kBlocks>& step, int64_t head, Prefetch& prefetch) {
    const Block& block = step.blocks[0];
    const char* const* k = step.k;
    const Scratch& scratch = rows_.scratch;
    const int stride = rows_.stride, D = rows_.D;
    const char* wide_keys[kBlock + kKeyStep];
    if (kWidenKeys && step.type != Dtype::kFloat32) {
      for (int n = 0; n < kBlock + kKeyStep; ++n) {
        float* row = scratch.k + std::min(n, block.keys - 1) * stride;
        if (n < block.keys) widen<Isa, Elem>(k[n], row, D, stride);
        wide_keys[n] = reinterpret_cast<const char*>(row);
      }
      k = wide_keys;
    }
    const char* copies[kBlock];
    const char* const* const values = prepare_values(step, copies);
    const bool copied = values == copies;
    const State state = rows_.state(head);
    const int units = static_cast<int>(ceil_div(block.keys, kPair));
    const int columns = static_cast<int>(round_up(D, Isa::W));
    prefetch.spread(tile_steps<Isa>(rows_.plan.rows, block.keys, columns));
    for (int64_t tile = 0; tile < rows_.plan.rows; tile += kTile) {
      const int rows = rows_.tile_rows(tile);
      if (!block.full && !rows_.mask(step.words[0], tile, mask_)) continue;
      score_tile<Isa, Dot>(rows_.queries(head, tile), rows, k, block.keys, D / kPair, scratch.s,
                           prefetch);
      if (rows_.a.softcap != 0) {
        cap_logits<Isa>(scratch.s, rows, block.keys, kTile, rows_.logit_scale, rows_.a.softcap);
      }
      if (collector_.wants(block)) {
        collector_.add(block, 0, block.keys, head, tile, {scratch.s, 1, kTile});
      }
      if (!block.full) mask_logits<Isa>(scratch.s, rows, 0, block.keys, mask_);
      softmax_tile<Isa, Dot>(scratch.s, rows, block.keys, rows_.scale, state.m + tile,
                             state.l + tile, scratch.alpha, scratch.p);
      const int used = static_cast<int>(std::min<int64_t>(rows, rows_.count - tile));
      const auto multiply = [&](auto rows_of_v) {
        value_tile<Isa>(scratch.p, used, rows_of_v, units, scratch.alpha, state.acc + tile * stride,
                        columns, stride, prefetch);
      };
      if constexpr (kPair == 2) {
        if (!copied) multiply(PairedRows<Isa, Dot>{values});
      }
      if (kPair == 1 || copied) multiply(UnitRows<Isa, Dot>{values});
    }
  }

  // Rows of values that need no conversion are read where they lie, if whole vectors; else a copy
  // of units, padded with zeros.
  const char* const* prepare_values(const Step<kBlocks>& step, const char** copies) {
    const int stride = rows_.stride, D = rows_.D, keys = step.keys;
    const char* const* const v = step.v;
    if (kWidenKeys ? step.type == Dtype::kFloat32 : D % (kPair * Isa::W) == 0) return v;
    if constexpr (kPair == 2) {
      for (int n = 0; n < keys; n += 2) {
        float* row = rows_.scratch.v + n / 2 * stride;
        Dot::pair_rows(reinterpret_cast<const Elem*>(v[n]), reinterpret_cast<const Elem*>(v[n + 1]),
                       row, D);
        copies[n / 2] = reinterpret_cast<const char*>(row);
      }
    } else {
      for (int n = 0; n < keys; ++n) {
        float* row = rows_.scratch.v + n * stride;
        widen<Isa, Elem>(v[n], row, D, stride);
        copies[n] = reinterpret_cast<const char*>(row);
      }
    }
    return copies;
  }

  const PackedRows<Isa, Elem>& rows_;
  Collector<Isa, Elem> collector_;
  TileMask mask_;
};

}  // namespace specattn
