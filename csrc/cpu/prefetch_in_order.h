// Prefetches what a few rows are multiplied with next, in the order of its addresses.
#pragma once

#include <algorithm>

#include "keys.h"
#include "tuning.h"
#include "types.h"

namespace specattn {

// Walks all keys of some heads in a step, then their values, then the next heads or the next step,
// a fixed distance in front of the products. On Zen 5 the processor reads ahead by itself along
// such a walk, and lines that are in the L1 cache in time leave what waits for memory to others.
template <class Isa>  // so that no other instruction set shares what is compiled for one
class PrefetchInOrder {
 public:
  // Of `heads` heads `abreast` are multiplied together, up to `keys` of the first before the next.
  PrefetchInOrder(int64_t heads, int64_t abreast, int keys, int64_t D, int64_t Dv)
      : heads_(heads),
        abreast_(abreast),
        D_(D),
        Dv_(Dv),
        parts_(2 * ceil_div(heads, abreast)),
        keys_(keys) {}

  void begin(const Step<1>& now, const Step<1>& next) {
    const bool first = now_ == nullptr;
    now_ = &now, next_ = &next;
    if (first) {
      open(0);
      // All that is multiplied before its rows are done, and at least what memory needs.
      take(std::max(keys_ * runs_ * lines_, tuning.lead_lines));
    } else if (part_ < parts_ || row_ == rows_) {  // fell behind, or waited for this step
      open(std::max<int64_t>(part_ - parts_, 0));
    } else {
      part_ -= parts_;
    }
  }

  // As many lines as the products take from a head's rows meanwhile.
  void beside(int keys, int64_t bytes) { take(keys * ceil_div(bytes, kLine)); }

 private:
  static constexpr int64_t kLine = 64;

  void take(int64_t lines) {
    while (lines > 0 && row_ < rows_) {
      const int64_t some = std::min(lines, left_);
      for (int64_t i = 0; i < some; ++i) __builtin_prefetch(at_ + kLine * i, 0, 3);
      at_ += kLine * some, left_ -= some, lines -= some;
      if (left_ == 0) advance();
    }
  }

  void advance() {
    if (++run_ == runs_) {
      run_ = 0;
      if (++row_ == rows_) return open(part_ + 1);
    }
    at_ = of_[row_] + first_ + run_ * apart_, left_ = lines_;
  }

  // Keys are even, values odd. The values of a next step are known once it is this one.
  void open(int64_t part) {
    part_ = part, row_ = rows_ = 0;
    if (part > parts_) return;
    const Step<1>& step = part < parts_ ? *now_ : *next_;
    const int64_t of = part % parts_ / 2 * abreast_;
    const bool values = part % 2 != 0;
    if (values && step.v_in_k) return open(part + 1);
    const int64_t bytes = (values ? Dv_ : D_) * size_of(step.type);
    runs_ = std::min(abreast_, heads_ - of);
    of_ = values ? step.v : step.k;
    apart_ = values ? step.v_head : step.k_head;
    first_ = of * apart_;
    const bool together = apart_ == bytes;
    lines_ = ceil_div(together ? runs_ * bytes : bytes, kLine);
    if (together) runs_ = 1;
    rows_ = step.keys, run_ = 0, left_ = lines_;
    if (rows_ > 0) at_ = of_[0] + first_;
  }

  const int64_t heads_, abreast_, D_, Dv_, parts_, keys_;
  const Step<1>*now_ = nullptr, *next_ = nullptr;
  const char *const *of_ = nullptr, *at_ = nullptr;
  int64_t part_ = 0, row_ = 0, rows_ = 0, run_ = 0, runs_ = 0, lines_ = 0, left_ = 0, first_ = 0,
          apart_ = 0;
};

}  // namespace specattn
