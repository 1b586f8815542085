// Prefetches the keys of the next step while one step is multiplied.
#pragma once

#include <algorithm>

namespace specattn {

// Walks the cache lines of some rows of K and V, or of both halves of rows that are both, a few at
// a time. Rows span all heads of a task
// where these lie together: in the order of addresses the hardware reads ahead by itself, and
// software alone cannot keep enough lines in flight to fill the memory's bandwidth. It reads ahead
// further at four locations than at one: both halves of the rows, of K and of V, go side by side.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const char* const* k, const char* const* v, int first, int last, int bytes)
      : k_(k), v_(v), row_(first), half_((last - first + 1) / 2), last_(last), bytes_(bytes) {
    end_ = first + half_;
  }
  Prefetch(const char* const* both, int first, int last, int bytes)
      : Prefetch(both, both, first, last, (bytes + 127) / 128 * 64) {
    v_apart_ = bytes_;
  }

  // Spreads all lines over so many ticks of the work that goes on beside.
  void pace(int ticks) {
    const int lines = half_ * ((bytes_ + 63) / 64);
    rate_ = (lines * 256 + ticks - 1) / ticks;
  }

  __attribute__((noinline)) void tick(int ticks = 1) { issue(due(ticks)); }

  // The lines to prefetch in so many ticks, or what is left of a row: for loops that cannot call.
  struct Lines {
    const char* at[4];
    int count;

    void touch(int tick) const {
      if (tick >= count) return;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) __builtin_prefetch(at[i] + 64 * tick, 0, 3);
    }
  };

  // Spreads them over so many steps instead, as many in each, a power of two: faster than what is
  // due in each (docs/log.md).
  void spread(int steps) {
    const int lines = half_ * ((bytes_ + 63) / 64);
    while (each_ * steps < lines) each_ *= 2;
  }

  // The lines of a step with so many ticks; what these cannot hold goes at once.
  Lines take(int ticks) {
    issue(each_ - ticks);
    if (row_ == end_) return {{}, 0};
    return next(std::min({each_, ticks, left()}));
  }

 private:
  int left() const { return (bytes_ - byte_ + 63) / 64; }  // lines of the row

  int due(int ticks) {
    credit_ += ticks * rate_;
    const int lines = credit_ / 256;
    credit_ %= 256;
    return lines;
  }

  void issue(int lines) {
    for (; lines > 0 && row_ < end_; --lines) next(1).touch(0);
  }

  // So many lines at each location, at most to the end of a row.
  Lines next(int count) {
    const int other = row_ + half_ < last_ ? row_ + half_ : row_;
    const int v_byte = byte_ + v_apart_;
    const Lines lines = {
        {k_[row_] + byte_, v_[row_] + v_byte, k_[other] + byte_, v_[other] + v_byte}, count};
    byte_ += 64 * count;
    if (byte_ >= bytes_) byte_ = 0, ++row_;
    return lines;
  }

  const char *const *k_ = nullptr, *const *v_ = nullptr;
  int row_ = 0, half_ = 0, end_ = 0, last_ = 0, bytes_ = 0, byte_ = 0, v_apart_ = 0, rate_ = 0,
      credit_ = 0, each_ = 1;
};

}  // namespace specattn
