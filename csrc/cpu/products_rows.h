// The products and the softmax of one block of keys and a few query rows, of several heads.
//
// A few rows leave time for little but reading, so keys go by in the order of their addresses, a
// few tokens at a time: heads lie side by side there, and the processor reads ahead along every
// token. A block's values are prefetched beside its scores, the next block's keys beside its
// values: no further, since what all heads of a block hold together may fill half of an L2 cache.
// And into L2 alone: what the L1 cache waits for from memory would hold up what it takes from
// there. Zen 5 wants it otherwise (prefetch_in_order.h).
#pragma once

#include "collect.h"
#include "keys.h"
#include "packed.h"
#include "prefetch_in_order.h"
#include "rows.h"
#include "rows_paired.h"
#include "stored.h"

namespace specattn {

template <class Isa, class Elem, class Few>
class RowProducts {
  static constexpr bool kMixed = Few::kMixed;
  // Rows of 8 bits hold scales between heads, and half the bytes are bound by their conversion.
  static constexpr bool kInOrder = Isa::kPrefetchesInOrder && !kMixed;
  using Step = specattn::Step<1>;

 public:
  // `starts` as in Keys.
  RowProducts(const PackedRows<Isa, Elem>& rows, const int64_t* starts)
      : rows_(rows),
        collector_(rows, starts),
        count_(static_cast<int>(rows.count)),
        abreast_(tuning.heads_abreast),
        prefetch_(rows.task.heads, abreast_, std::max(Few::keys_at_once(count_), Few::kValueKeys),
                  rows.D, rows.Dv),
        per_head_(round_up(rows.count, kRowsAbreast) * kBlock),
        s_(rows.scratch.k),
        p_(s_ + kMostAbreast * per_head_),
        part_(p_ + kMostAbreast * per_head_) {
    static_assert(kMostAbreast * kFewRows * (2 * kBlock + kMaxHeadDim) <= Scratch::kKeyFloats);
  }

  void multiply(const Step& step, const Step& next) {
    if constexpr (kMixed) few_.type = step.type;
    const int64_t size = size_of(step.type);
    const int once = Few::keys_at_once(count_);
    if constexpr (kInOrder) prefetch_.begin(step, next);
    for (int64_t first = 0; first < rows_.task.heads; first += abreast_) {
      const int64_t last = std::min(first + abreast_, rows_.task.heads);
      for (int n = 0; n < step.keys; n += once) {
        for (int64_t head = first; head < last; ++head) {
          if constexpr (kInOrder) {
            prefetch_.beside(once, rows_.D * size);
          } else if (!step.v_in_k) {
            look_ahead(step, step.v, head * step.v_head, n, once, rows_.Dv);
          }
          const char* k[Few::kKeys];
          addresses(step, step.k, head * step.k_head, n, once, k);
          few_.score(rows_.queries(head, 0), rows_.stride, count_, k, rows_.D,
                     s_ + (head - first) * per_head_ + n);
        }
      }
      for (int64_t head = first; head < last; ++head) weigh(step, head, head - first);
      for (int n = 0; n < step.keys; n += Few::kValueKeys) {
        for (int64_t head = first; head < last; ++head) {
          if constexpr (kInOrder) {
            prefetch_.beside(Few::kValueKeys, rows_.Dv * size);
          } else {
            look_ahead(next, next.k, head * next.k_head, n, Few::kValueKeys, rows_.D);
          }
          const char* v[Few::kValueKeys];
          const int keys = std::min(Few::kValueKeys, step.keys - n);
          addresses(step, step.v, head * step.v_head, n, Few::kValueKeys, v);
          few_.value(p_ + (head - first) * per_head_, n, count_, v, keys, part(head - first),
                     rows_.v_stride, rows_.Dv);
        }
      }
      for (int64_t head = first; head < last; ++head) {
        const State state = rows_.state(head);
        for (int r = 0; r < count_; ++r) {
          few_.add(state.acc + r * rows_.v_stride, alpha_[(head - first) * kFewRows + r],
                   part(head - first) + r * rows_.v_stride, rows_.Dv, part_unit_[head - first]);
        }
      }
    }
  }

 private:
  // Heads lie as close as they can: at powers of two they would share a few sets of the L1 cache.
  float* part(int64_t head) const { return part_ + head * count_ * rows_.v_stride; }

  // Of some keys from n on; what no row sees, and what does not exist, is nothing.
  static void addresses(const Step& step, const char* const* rows, int64_t head, int n, int count,
                        const char** to) {
    const Block& block = step.blocks[0];
    if (block.full && n + count <= step.keys) {
      for (int i = 0; i < count; ++i) to[i] = rows[n + i] + head;
      return;
    }
    for (int i = 0; i < count; ++i) {
      const bool seen = n + i < step.keys && (block.full || (block.seen >> (n + i) & 1) != 0);
      to[i] = seen ? rows[n + i] + head : reinterpret_cast<const char*>(kNothing);
    }
  }

  void look_ahead(const Step& next, const char* const* rows, int64_t head, int n, int count,
                  int D) const {
    const int64_t bytes = D * (kMixed ? 1 : static_cast<int64_t>(sizeof(Elem)));
    for (int i = n; i < std::min(n + count, next.keys); ++i) {
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows[i] + head + at, 0, 2);
    }
  }

  // From logits to weights, of the head that is `abreast` here.
  void weigh(const Step& step, int64_t head, int64_t abreast) {
    using Weight = std::conditional_t<kMixed, float, typename Few::Weight>;
    const Block& block = step.blocks[0];
    const State state = rows_.state(head);
    float *const s = s_ + abreast * per_head_, *const p = p_ + abreast * per_head_;
    if constexpr (kMixed) scale<float>(step, step.k_scale, head * step.k_scale_head, s);
    if (rows_.a.softcap != 0) {
      const int keys = static_cast<int>(round_up(block.keys, Isa::W));
      cap_logits<Isa>(s, keys, count_, kBlock, rows_.logit_scale, rows_.a.softcap);
    }
    if (collector_.wants(block)) {
      collector_.begin(block.keys);
      collector_.add(block, 0, block.keys, head, 0, {s, kBlock, 1});
      collector_.end(block, 0, head);
    }
    const uint64_t all = ~uint64_t{0} >> (kBlock - block.keys);
    for (int r = 0; r < count_; ++r) {
      const uint64_t visible = block.full ? all : step.words[0][r / rows_.a.group()];
      softmax_row<Isa>(s + r * kBlock, block.keys, visible, rows_.scale, state.m + r, state.l + r,
                       alpha_ + abreast * kFewRows + r, reinterpret_cast<Weight*>(p + r * kBlock));
    }
    if constexpr (kMixed) {
      part_unit_[abreast] =
          scale<typename Few::Weight>(step, step.v_scale, head * step.v_scale_head, p);
    }
  }

  // Multiplies logits by the scales of their keys, or weights by those of their values. Where these
  // are rounded they come to be over what is returned.
  template <class To>
  float scale(const Step& step, const char* const (&rows)[kBlock], int64_t head, float* x) const {
    constexpr bool rounded = !std::is_same_v<To, float>;
    if (!rounded && !step.multiplies(Few::kOverUnit)) return 1.0f;
    float factors[kBlock + Isa::W] = {}, unit = 1.0f;
    if (rounded) {
      unit = relative_scales<Isa>(step, rows, head, factors);
    } else {
      step.scales(rows, head, Few::kOverUnit, factors);
    }
    for (int n = 0; n < step.keys; n += Isa::W) {
      const auto factor = Isa::load(factors + n);
      for (int r = 0; r < count_; ++r) {
        float* const row = x + r * kBlock;
        Isa::store_as(reinterpret_cast<To*>(row) + n, Isa::mul(Isa::load(row + n), factor));
      }
    }
    return unit;
  }

  Few few_;
  const PackedRows<Isa, Elem>& rows_;
  Collector<Isa, Elem> collector_;
  const int count_;
  const int64_t abreast_;
  PrefetchInOrder<Isa> prefetch_;
  const int64_t per_head_;  // logits, and weights
  float *const s_, *const p_, *const part_;
  float part_unit_[kMostAbreast];                       // parts are over it
  float alpha_[kMostAbreast * kFewRows + kRowPadding];  // the last is stored as a vector
};

}  // namespace specattn
