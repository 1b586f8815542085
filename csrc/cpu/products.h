// The products and the softmax of one block of keys and one head, with vectors.
#pragma once

#include <algorithm>

#include "collect.h"
#include "convert.h"
#include "keys.h"
#include "packed.h"
#include "rows_paired.h"
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

// Keys of 8 bits as elements, `floats` apart: of `keys` some are copied beside the products of
// those before. Sums are multiplied by scales, if there are any.
template <class Isa, class Elem, class Stored>
struct CopiedKeys {
  using Copied = CopiedUnits<Isa, Elem, Stored>;
  static constexpr int kOnce = Copied::kOnce;
  const char* const* rows;
  const float* scales;
  float* to;
  int keys, D, floats;

  struct Beside {
    Prefetch::Lines lines;
    CopiedKeys of;
    int first, n, last, d, each;

    void touch(int tick) {
      lines.touch(tick);
      for (int i = 0; i < each && n < last; ++i) {
        of.copy(n, d);
        if ((d += kOnce) >= of.D) d = 0, ++n;
      }
    }
    template <class>
    typename Isa::V meant(typename Isa::V sum, int r) const {
      return of.scales ? Isa::mul(sum, Isa::set1(of.scales[first + r])) : sum;
    }
  };

  Beside beside(int first, int count, Prefetch::Lines lines) const {
    const int each = static_cast<int>(ceil_div(kKeyStep * ceil_div(D, kOnce), ceil_div(D, 8)));
    const int n = first + count;
    return {lines, *this, first, n, std::min(n + kKeyStep, keys), 0, each};
  }

  void copy(int n, int d) const { Copied::copy(rows[n], d, D, to + n * floats); }
};

// Units of two rows of values of 8 bits, copied as they are loaded.
template <class Isa, class Dot_, class Stored>
struct CopiedPairs {
  using Dot = Dot_;
  static constexpr bool kSingle = true;
  const char* const* rows;
  float* to;
  int stride, D;

  static void in_order(typename Isa::V*) {}

  template <int DB>
  void load(int u, int column, typename Isa::V (&y)[DB]) const {
    using Units = typename Isa::template Units<Stored>;
    typename Isa::V two[2];
    if (D - column >= 2 * Isa::W) {
      Units::load_pair(rows[2 * u], rows[2 * u + 1], column, two);
    } else {
      Units::load_pair(rows[2 * u], rows[2 * u + 1], column, D - column, two);
    }
    float* const at = to + u * stride + column;
#pragma GCC unroll 2
    for (int j = 0; j < DB; ++j) Isa::store(at + j * Isa::W, two[j]), y[j] = two[j];
  }
};

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
    const int stride = rows_.stride, D = rows_.D, v_stride = rows_.v_stride;
    const char* wide_keys[kBlock + kKeyStep];
    const bool widened = kWidenKeys && step.type != Dtype::kFloat32;
    if (widened) {
      for (int n = 0; n < kBlock + kKeyStep; ++n) {
        float* row = scratch.k + std::min(n, block.keys - 1) * stride;
        if (n < block.keys) widen<Isa, Elem>(k[n], row, D, stride);
        wide_keys[n] = reinterpret_cast<const char*>(row);
      }
      k = wide_keys;
    }
    const bool stored = kTakesStored && of_8_bits(step.type);
    const char* copies[kBlock];
    float unit = 1.0f, k_scales[kBlock + kKeyStep], v_scales[kBlock];
    if constexpr (kTakesStored) {
      if (stored) {
        place_copies(step.keys, wide_keys, copies);
        k = wide_keys;
        if (step.scaled) {
          step.scales(step.k_scale, head * step.k_scale_head, false, k_scales);
          std::fill(k_scales + step.keys, k_scales + step.keys + kKeyStep, 0.0f);
          unit = relative_scales<Isa>(step, step.v_scale, head * step.v_scale_head, v_scales);
        }
      }
    }
    const bool scaled = stored && step.scaled;
    const char* const* values = stored                   ? copies
                                : widened && step.v_in_k ? wide_keys
                                                         : prepare_values(step, copies);
    const bool copied = values == copies;
    bool fresh = stored;  // nothing is copied yet
    const State state = rows_.state(head);
    const int units = static_cast<int>(ceil_div(block.keys, kPair));
    const int columns = static_cast<int>(round_up(rows_.Dv, Isa::W));
    prefetch.spread(tile_steps<Isa>(rows_.plan.rows, block.keys, columns));
    for (int64_t tile = 0; tile < rows_.plan.rows; tile += kTile) {
      const int rows = rows_.tile_rows(tile);
      const Seen seen = rows_.seen(block, step.words[0], tile, mask_);
      if (seen == Seen::kNothing) continue;
      const auto score = [&](const auto& copy) {
        score_tile<Isa, Dot>(rows_.queries(head, tile), rows, k, block.keys, D / kPair, scratch.s,
                             prefetch, copy);
      };
      if (!stored) score(Alone{});
      if constexpr (kTakesStored) {
        if (stored) {
          with_8_bits(step.type, [&](auto tag) {
            score(copied_keys(step, tag, scaled ? k_scales : nullptr, fresh));
          });
        }
      }
      if (rows_.a.softcap != 0) {
        cap_logits<Isa>(scratch.s, rows, block.keys, kTile, rows_.logit_scale, rows_.a.softcap);
      }
      if (collector_.wants(block)) {
        collector_.add(block, 0, block.keys, head, tile, {scratch.s, 1, kTile});
      }
      if (seen == Seen::kSome) mask_logits<Isa>(scratch.s, rows, 0, block.keys, mask_);
      softmax_tile<Isa, Dot>(scratch.s, rows, block.keys, rows_.scale, state.m + tile,
                             state.l + tile, scratch.alpha, scratch.p, scaled ? v_scales : nullptr);
      const int used = static_cast<int>(std::min<int64_t>(rows, rows_.count - tile));
      const auto multiply = [&](auto first, auto rows_of_v) {
        value_tile<Isa>(scratch.p, used, first, rows_of_v, units, scratch.alpha, unit,
                        state.acc + tile * v_stride, columns, v_stride, prefetch);
      };
      const UnitRows<Isa, Dot> whole{values};
      if constexpr (kPair == 2) {
        const PairedRows<Isa, Dot> lying{values};
        if (!copied) multiply(lying, lying);
        if (fresh) {
          with_8_bits(step.type, [&](auto tag) {
            using Stored = typename decltype(tag)::type;
            multiply(CopiedPairs<Isa, Dot, Stored>{step.v, values_memory(), v_stride, rows_.Dv},
                     whole);
          });
        }
      }
      if (kPair == 1 || (copied && !fresh)) multiply(whole, whole);
      fresh = false;
    }
  }

  // Where keys of 8 bits, and pairs of values, come to lie as elements.
  void place_copies(int count, const char** keys, const char** values) const {
    const int floats = key_floats();
    for (int n = 0; n < kBlock + kKeyStep; ++n) {
      keys[n] = reinterpret_cast<char*>(rows_.scratch.k + std::min(n, count - 1) * floats);
    }
    for (int u = 0; u < ceil_div(count, kPair); ++u) {
      values[u] = reinterpret_cast<char*>(values_memory() + u * rows_.v_stride);
    }
  }

  int key_floats() const { return CopiedUnits<Isa, Elem, int8_t>::floats(rows_.D); }
  // Keys that one tile is done with leave their place in the L1 cache.
  float* values_memory() const {
    return rows_.plan.rows <= kTile ? rows_.scratch.k : rows_.scratch.v;
  }

  // What copies keys, of which the first few are there then; nothing where all are.
  template <class Stored>
  auto copied_keys(const Step<kBlocks>& step, Tag<Stored>, const float* scales, bool fresh) const {
    const CopiedKeys<Isa, Elem, Stored> keys{
        step.k, scales, rows_.scratch.k, fresh ? step.keys : 0, rows_.D, key_floats()};
    for (int n = 0; n < std::min(kKeyStep, keys.keys); ++n) {
      for (int d = 0; d < rows_.D; d += keys.kOnce) keys.copy(n, d);
    }
    return keys;
  }

  // Rows of values that need no conversion are read where they lie, if whole vectors; else a copy
  // of units, padded with zeros.
  const char* const* prepare_values(const Step<kBlocks>& step, const char** copies) {
    const int stride = rows_.v_stride, D = rows_.Dv, keys = step.keys;
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
