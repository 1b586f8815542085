// Memory of a call: sizes follow rows and heads, never the number of cached tokens.
#pragma once

#include <cstdlib>
#include <new>

#include "types.h"

namespace specattn {

// Grows and is kept for the next call; one per calling thread.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(data_); }

  float* floats(int64_t count) {
    const size_t bytes = static_cast<size_t>(round_up(count * 4, 4096));
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(4096, bytes));
      if (!data_) throw std::bad_alloc();
      std::memset(data_, 0, bytes);  // padded rows are multiplied too: garbage may be slow to
      bytes_ = bytes;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t bytes_ = 0;
};

// The running softmax of the rows of one KV head: the accumulator, the running maximum and the
// running sum.
struct State {
  float *acc, *m, *l;  // [rows][stride], [rows], [rows]

  static int64_t floats(int64_t rows, int64_t stride) { return rows * (stride + 2); }
  State(float* at, int64_t rows, int64_t stride) : acc(at), m(at + rows * stride), l(m + rows) {}
};

// What one thread needs while it works on a task.
struct Scratch {
  static constexpr int64_t kKeyFloats = kMostKeys / 2 * kMaxHeadDim;  // of k, and of v

  float *s, *p, *k, *v, *alpha, *q, *state;
  float* stored;  // k and v of 8 bits as they are multiplied

  static int64_t floats(int64_t q_floats, int64_t state_floats, bool stores) {
    return kTile * (kBlock + kMostKeys) + 2 * kKeyFloats + kTile + round_up(q_floats, 16) +
           round_up(state_floats, 16) + (stores ? 2 * kKeyFloats : 0);
  }
  Scratch(float* at, int64_t q_floats, int64_t state_floats) {
    s = at;
    p = s + kBlock * kTile;
    k = p + kMostKeys * kTile;
    v = k + kKeyFloats;
    alpha = v + kKeyFloats;
    q = alpha + kTile;
    state = q + round_up(q_floats, 16);
    stored = state + round_up(state_floats, 16);
  }
};

}  // namespace specattn
