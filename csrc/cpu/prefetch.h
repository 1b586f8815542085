// Keys that come next: while one step is multiplied, its share of the next block is on its way.
#pragma once

namespace specattn {

// Walks the cache lines of some rows of K, then of V, a few at a time. Rows span all heads of a
// task where these lie together: in the order of addresses the hardware reads ahead by itself, and
// software alone cannot keep enough lines in flight to fill the memory's bandwidth.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const char* const* k, const char* const* v, int first, int last, int bytes)
      : rows_{k, v},
        first_(first),
        row_(first),
        last_(last),
        bytes_(bytes),
        side_(first < last ? 0 : 2) {}

  // Spreads all lines over so many ticks of the work that goes on beside.
  void pace(int ticks) {
    const int lines = (last_ - first_) * 2 * ((bytes_ + 63) / 64);
    rate_ = (lines * 256 + ticks - 1) / ticks;
  }

  __attribute__((noinline)) void tick(int ticks = 1) {
    credit_ += ticks * rate_;
    issue(credit_ / 256);
    credit_ %= 256;
  }

  // The lines of so many ticks, or what is left of a row: for a loop that cannot stop to call.
  struct Lines {
    const char* at;
    int last;

    void touch(int tick) const { __builtin_prefetch(at + 64 * (tick < last ? tick : last), 0, 2); }
  };

  Lines take(int ticks) {
    credit_ += ticks * rate_;
    const int due = credit_ / 256;
    credit_ %= 256;
    if (due > ticks) issue(due - ticks);
    if (side_ == 2 || due == 0) return {reinterpret_cast<const char*>(this), 0};
    const char* const at = rows_[side_][row_] + byte_;
    const int left = (bytes_ - byte_ + 63) / 64, wanted = due < ticks ? due : ticks;
    const int count = wanted < left ? wanted : left;
    pass(count);
    return {at, count - 1};
  }

  void issue(int lines) {
    while (lines > 0 && side_ < 2) {
      const char* const at = rows_[side_][row_] + byte_;
      const int left = (bytes_ - byte_ + 63) / 64, run = lines < left ? lines : left;
      for (int i = 0; i < run; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
      lines -= run;
      pass(run);
    }
  }

 private:
  // On by so many lines, at most to the end of a row.
  void pass(int lines) {
    byte_ += 64 * lines;
    if (byte_ < bytes_) return;
    byte_ = 0;
    if (++row_ < last_) return;
    row_ = first_;
    ++side_;
  }

  const char* const* rows_[2] = {};
  int first_ = 0, row_ = 0, last_ = 0, bytes_ = 0, side_ = 2, byte_ = 0, rate_ = 0, credit_ = 0;
};

}  // namespace specattn
