// The k greatest scores of each row by counting digits: three passes of eleven bits, no sort.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "convert.h"
#include "run.h"
#include "types.h"

namespace specattn {
namespace {

constexpr int kBits = 11, kBins = 1 << kBits;

// Integers in the order of the floats; -inf and NaN are least, -0 equals 0.
inline uint32_t order(float x) {
  uint32_t u = float_bits(x + 0.0f);
  const bool least = (u & 0x7fffffffu) > 0x7f800000u || u == 0xff800000u;
  u ^= (u & 0x80000000u) ? 0xffffffffu : 0x80000000u;
  return least ? 0 : u;
}

// What belongs to the selection: everything above `value`, and all but the first `skip` equal to
// it.
struct Threshold {
  uint32_t value;
  int64_t skip;
};

// 32 bits as 11 + 11 + 10, from the top; `prefix` holds the digits already fixed.
Threshold find_threshold(const float* scores, int64_t count, int64_t k, int32_t* bins) {
  uint32_t prefix = 0;
  int64_t wanted = k, equal = count;
  for (const int shift : {21, 10, 0}) {
    const int bits = shift == 0 ? 10 : kBits;
    const uint32_t mask = (1u << bits) - 1;
    std::fill(bins, bins + kBins, 0);
    const int above = shift + bits;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t u = order(scores[i]);
      if (above == 32 || u >> above == prefix >> above) ++bins[u >> shift & mask];
    }
    uint32_t digit = mask;
    while (bins[digit] < wanted) wanted -= bins[digit--];
    equal = bins[digit];
    prefix |= digit << shift;
  }
  return {prefix, equal - wanted};
}

int64_t selection_size(const TopK& p, int64_t length) {
  const double share = std::ceil(p.ratio * static_cast<double>(length) - 1e-6);
  int64_t k = p.ratio >= 0 ? static_cast<int64_t>(share) : p.budget;
  k = std::max({k, p.min_tokens, p.keep_first + p.keep_last});
  return std::clamp<int64_t>(k, 0, std::min(length, p.width));
}

void select_row(const TopK& p, int64_t outer, int64_t inner) {
  const int64_t length = p.lengths[outer * p.lengths_stride];
  const int64_t k = selection_size(p, length);
  const float* scores = p.scores + outer * p.scores_outer + inner * p.scores_inner;
  int32_t* to = p.indices + outer * p.indices_outer + inner * p.indices_inner;
  int32_t* const end = to + p.width;
  p.counts[outer * p.counts_outer + inner * p.counts_inner] = static_cast<int32_t>(k);
  const int64_t first = std::min(p.keep_first, k), last = length - std::min(p.keep_last, k - first);
  const int64_t chosen = k - first - (length - last);
  for (int64_t i = 0; i < first; ++i) *to++ = static_cast<int32_t>(i);
  if (chosen > 0) {
    int32_t bins[kBins];
    Threshold limit = find_threshold(scores + first, last - first, chosen, bins);
    for (int64_t i = first; i < last; ++i) {
      const uint32_t u = order(scores[i]);
      if (u < limit.value || (u == limit.value && limit.skip-- > 0)) continue;
      *to++ = static_cast<int32_t>(i);
    }
  }
  for (int64_t i = last; i < length; ++i) *to++ = static_cast<int32_t>(i);
  std::fill(to, end, -1);
}

}  // namespace

void run(const TopK& p, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < p.rows_outer * p.rows_inner; ++i) {
    select_row(p, i / p.rows_inner, i % p.rows_inner);
  }
}

}  // namespace specattn
