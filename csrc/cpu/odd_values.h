// Values that are NaN or infinite, of keys that some rows of a block see and others do not.
//
// A weight of zero times such a value is NaN, so they are no part of the products: zeros stand in
// their places, and afterwards they are added to the rows that see them. Looking for them costs a
// pass over the values of such keys: those of a tree, and those where windows begin.
#pragma once

#include <cmath>

#include "keys.h"
#include "packed.h"
#include "types.h"

namespace specattn {

// Whose values a step has: `count` heads, of which the first is the task's `first`.
struct HeadRange {
  int64_t first, count;
};

// The sums of a head's packed rows; column d lies in place(d), or where that is null in order.
struct RowSums {
  float* acc;
  int64_t stride, rows, group;
  int (*place)(int d);
};

// The same step with zeros for odd values, valid until this thread's next call of this; and what
// adds the odd values of the range's head number h to the rows that see them.
template <int kBlocks>
const Step<kBlocks>& without_odd_values(const Step<kBlocks>& step, HeadRange heads, int Dv);
template <int kBlocks>
void add_odd_values(const Step<kBlocks>& step, HeadRange heads, int64_t h, int Dv, RowSums sums);

// Zero, or NaN where some of a row is odd, after `sum`.
template <class Isa, class Stored>
inline typename Isa::V zero_times(const char* row, int D, typename Isa::V sum) {
  const Stored* from = reinterpret_cast<const Stored*>(row);
  int d = 0;
  for (; d + Isa::W <= D; d += Isa::W) {
    sum = Isa::fma(Isa::load_units(from + d), Isa::zero(), sum);
  }
  float rest = 0;
  for (; d < D; ++d) rest += to_float(from[d]) * 0.0f;
  return Isa::add(sum, Isa::set1(rest));
}

template <class Isa, class Stored, int kBlocks>
bool holds_odd_values(const Step<kBlocks>& step, HeadRange heads, int Dv) {
  auto sum = Isa::zero();
  for (int i = 0; i < step.count; ++i) {
    for (uint64_t left = step.blocks[i].seen_by_some(); left != 0; left &= left - 1) {
      const int n = i * kBlock + __builtin_ctzll(left);
      for (int64_t h = 0; h < heads.count; ++h) {
        if (!std::is_same_v<Stored, int8_t>) {
          sum = zero_times<Isa, Stored>(step.v[n] + h * step.v_head, Dv, sum);
        }
        if (sizeof(Stored) == 1 && step.scaled) {
          sum = Isa::fma(Isa::set1(step.v_scale_of(n, heads.first + h)), Isa::zero(), sum);
        }
      }
    }
  }
  return std::isnan(Isa::sum(sum));
}

template <class Isa, class Elem, int kBlocks>
class OddValues {
 public:
  explicit OddValues(const PackedRows<Isa, Elem>& rows) : rows_(rows) {}

  // What the products may take of a step.
  const Step<kBlocks>& take_out(const Step<kBlocks>& step, HeadRange heads) {
    found_ = nullptr;
    for (int i = 0; i < step.count; ++i) {
      if (step.blocks[i].seen_by_some() != 0) return look(step, heads);
    }
    return step;
  }

  // After the products.
  void add() const {
    if (!found_) return;
    int (*place)(int) = nullptr;
    if constexpr (kTiles<Isa, Elem>) place = rows_.few ? nullptr : Isa::place;
    for (int64_t h = 0; h < heads_.count; ++h) {
      float* const acc = rows_.state(heads_.first + h).acc;
      const RowSums sums{acc, rows_.v_stride, rows_.count, rows_.a.group(), place};
      add_odd_values(*found_, heads_, h, rows_.Dv, sums);
    }
  }

 private:
  const Step<kBlocks>& look(const Step<kBlocks>& step, HeadRange heads) {
    bool odd = false;
    if (of_8_bits(step.type)) {
      with_8_bits(step.type, [&](auto tag) {
        odd = holds_odd_values<Isa, typename decltype(tag)::type>(step, heads, rows_.Dv);
      });
    } else if (step.type == Dtype::kFloat32) {
      odd = holds_odd_values<Isa, float>(step, heads, rows_.Dv);
    } else {
      odd = holds_odd_values<Isa, Elem>(step, heads, rows_.Dv);
    }
    if (!odd) return step;
    found_ = &step, heads_ = heads;
    return without_odd_values(step, heads, rows_.Dv);
  }

  const PackedRows<Isa, Elem>& rows_;
  const Step<kBlocks>* found_ = nullptr;  // the step that has some
  HeadRange heads_ = {};
};

}  // namespace specattn
