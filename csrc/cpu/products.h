// The products and the softmax of one block of keys and one head, with vectors.
#pragma once

#include <algorithm>

#include "collect.h"
#include "convert.h"
#include "keys.h"
#include "packed.h"
#include "state.h"
#include "stored.h"
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
  static constexpr bool kTakesStored = kPair == 2;  // of 8 bits

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
    const bool stored = kTakesStored && of_8_bits(step.type);
    float unit = 1.0f, k_scales[kBlock], v_scales[kBlock];
    if constexpr (kTakesStored) {
      if (stored) {
        copy_keys(step, wide_keys);
        k = wide_keys;
        if (step.scaled) {
          step.scales(step.k_scale, head * step.k_scale_head, false, k_scales);
          unit = relative_scales<Isa>(step, step.v_scale, head * step.v_scale_head, v_scales);
        }
      }
    }
    const bool scaled = stored && step.scaled;
    const char* copies[kBlock];
    const char* const* values = stored ? copies : prepare_values(step, copies);
    const bool copied = values == copies;
    bool paired = false;
    const State state = rows_.state(head);
    const int units = static_cast<int>(ceil_div(block.keys, kPair));
    const int columns = static_cast<int>(round_up(D, Isa::W));
    prefetch.spread(tile_steps<Isa>(rows_.plan.rows, block.keys, columns));
    for (int64_t tile = 0; tile < rows_.plan.rows; tile += kTile) {
      const int rows = rows_.tile_rows(tile);
      if (!block.full && !rows_.mask(step.words[0], tile, mask_)) continue;
      score_tile<Isa, Dot>(rows_.queries(head, tile), rows, k, block.keys, D / kPair, scratch.s,
                           prefetch);
      if (scaled) scale_logits(scratch.s, rows, block.keys, k_scales);
      if (rows_.a.softcap != 0) {
        cap_logits<Isa>(scratch.s, rows, block.keys, kTile, rows_.logit_scale, rows_.a.softcap);
      }
      if (collector_.wants(block)) {
        collector_.add(block, 0, block.keys, head, tile, {scratch.s, 1, kTile});
      }
      if (!block.full) mask_logits<Isa>(scratch.s, rows, 0, block.keys, mask_);
      softmax_tile<Isa, Dot>(scratch.s, rows, block.keys, rows_.scale, state.m + tile,
                             state.l + tile, scratch.alpha, scratch.p, scaled ? v_scales : nullptr);
      if constexpr (kTakesStored) {
        if (stored && !paired) pair_values(step, copies), paired = true;
      }
      const int used = static_cast<int>(std::min<int64_t>(rows, rows_.count - tile));
      const auto multiply = [&](auto rows_of_v) {
        value_tile<Isa>(scratch.p, used, rows_of_v, units, scratch.alpha, unit,
                        state.acc + tile * stride, columns, stride, prefetch);
      };
      if constexpr (kPair == 2) {
        if (!copied) multiply(PairedRows<Isa, Dot>{values});
      }
      if (kPair == 1 || copied) multiply(UnitRows<Isa, Dot>{values});
    }
  }

  // Keys of 8 bits become elements, side by side.
  void copy_keys(const Step<kBlocks>& step, const char** copies) const {
    constexpr int kOnce = 4 * Isa::W;
    const int D = rows_.D, floats = static_cast<int>(round_up(D, kOnce)) / kPair;
    with_8_bits(step.type, [&](auto tag) {
      using Units = typename Isa::template Units<typename decltype(tag)::type>;
      for (int n = 0; n < step.keys; ++n) {
        float* const row = rows_.scratch.k + n * floats;
        copies[n] = reinterpret_cast<const char*>(row);
        typename Isa::V two[2];
        int d = 0;
        for (; d + kOnce <= D; d += kOnce) {
          Units::load(step.k[n] + d, two);
          Isa::store(row + d / kPair, two[0]), Isa::store(row + d / kPair + Isa::W, two[1]);
        }
        if (d < D) {
          Units::load(step.k[n] + d, D - d, two);
          Isa::store(row + d / kPair, two[0]), Isa::store(row + d / kPair + Isa::W, two[1]);
        }
      }
    });
    for (int n = step.keys; n < kBlock + kKeyStep; ++n) copies[n] = copies[step.keys - 1];
  }

  // Units of two rows of values of 8 bits, padded with zeros; where the keys are done with, these
  // leave their place in the L1 cache to them.
  void pair_values(const Step<kBlocks>& step, const char** copies) const {
    constexpr int kOnce = 2 * Isa::W;
    const int D = rows_.D;
    float* const memory = rows_.plan.rows <= kTile ? rows_.scratch.k : rows_.scratch.v;
    with_8_bits(step.type, [&](auto tag) {
      using Units = typename Isa::template Units<typename decltype(tag)::type>;
      for (int n = 0; n < step.keys; n += 2) {
        float* const row = memory + n / 2 * rows_.stride;
        copies[n / 2] = reinterpret_cast<const char*>(row);
        typename Isa::V two[2];
        for (int d = 0; d < D; d += kOnce) {
          if (D - d >= kOnce) {
            Units::load_pair(step.v[n], step.v[n + 1], d, two);
          } else {
            Units::load_pair(step.v[n], step.v[n + 1], d, D - d, two);
          }
          Isa::store(row + d, two[0]), Isa::store(row + d + Isa::W, two[1]);
        }
      }
    });
  }

  static void scale_logits(float* s, int rows, int keys, const float* scales) {
    for (int n = 0; n < keys; ++n) {
      const auto factor = Isa::set1(scales[n]);
      for (int j = 0; j < rows; j += Isa::W) {
        float* const at = s + n * kTile + j;
        Isa::store(at, Isa::mul(Isa::load(at), factor));
      }
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
