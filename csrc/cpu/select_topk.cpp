// The k greatest scores of each row by counting digits: three passes of eleven bits, no sort.
//
// Vectors find which of 64 scores a pass is about; the few that remain are walked one by one.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "convert.h"
#include "run.h"
#include "team.h"
#include "types.h"

#if defined(__x86_64__)
#define SPECATTN_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SPECATTN_CLONES
#endif

namespace specattn {
namespace {

constexpr int kBits = 11, kBins = 1 << kBits;
constexpr int kChunk = 64;
constexpr int kCounters = 4;               // neighbours often share a first digit: they count apart
constexpr int64_t kWorkPerScore = 1 << 5;  // in the units of useful_threads

// Integers in the order of the floats; -inf and NaN are least, -0 equals 0.
inline uint32_t order(float x) {
  uint32_t u = float_bits(x + 0.0f);
  const bool least = ((u & 0x7fffffffu) > 0x7f800000u) | (u == 0xff800000u);
  u ^= (u & 0x80000000u) ? 0xffffffffu : 0x80000000u;
  return least ? 0 : u;
}

// Up to 64 scores as integers; what is missing comes last in the order.
struct Chunk {
  uint32_t keys[kChunk];

  inline __attribute__((always_inline)) Chunk(const float* scores, int64_t count) {
    float x[kChunk];
    if (count < kChunk) std::fill(x, x + kChunk, -kInf);
    std::memcpy(x, scores, sizeof(float) * static_cast<size_t>(std::min<int64_t>(count, kChunk)));
    for (int j = 0; j < kChunk; ++j) keys[j] = order(x[j]);
  }

  // Bit j: what `test` says of key j.
  template <class Test>
  inline __attribute__((always_inline)) uint64_t where(Test test) const {
    uint8_t flags[kChunk];
    for (int j = 0; j < kChunk; ++j) flags[j] = test(keys[j]);
    uint64_t bits = 0;
    for (int j = 0; j < kChunk; j += 8) {
      uint64_t eight;
      std::memcpy(&eight, flags + j, sizeof eight);
      bits |= (eight * 0x0102040810204080u >> 56) << j;  // gathers the low bit of every byte
    }
    return bits;
  }
};

inline uint64_t first_bits(int64_t count) {
  return count < kChunk ? (uint64_t{1} << count) - 1 : ~uint64_t{0};
}

// Counts the digits at `shift` of the scores whose digits above it are those of `prefix`; only the
// first digits go to more than bins[0].
SPECATTN_CLONES void count_digits(const float* scores, int64_t count, int shift, int bits,
                                  uint32_t prefix, int32_t (*bins)[kBins]) {
  const uint32_t mask = (1u << bits) - 1;
  const int above = shift + bits;
  for (int64_t i = 0; i < count; i += kChunk) {
    const Chunk chunk(scores + i, count - i);
    if (above == 32 && count - i >= kChunk) {
      for (int j = 0; j < kChunk; ++j) ++bins[j % kCounters][chunk.keys[j] >> shift];
      continue;
    }
    uint64_t equal = first_bits(count - i);
    if (above < 32) {
      equal &= chunk.where([=](uint32_t key) { return key >> above == prefix >> above; });
    }
    for (; equal; equal &= equal - 1) {
      const int j = __builtin_ctzll(equal);
      ++bins[0][chunk.keys[j] >> shift & mask];
    }
  }
}

// What belongs to the selection: everything above `value`, and all but the first `skip` equal to
// it.
struct Threshold {
  uint32_t value;
  int64_t skip;
};

// 32 bits as 11 + 11 + 10, from the top; `prefix` holds the digits already fixed.
Threshold find_threshold(const float* scores, int64_t count, int64_t k) {
  int32_t bins[kCounters][kBins];
  uint32_t prefix = 0;
  int64_t wanted = k, equal = count;
  for (const int shift : {21, 10, 0}) {
    const int bits = shift == 0 ? 10 : kBits;
    const int counters = shift == 21 ? kCounters : 1;
    std::fill(bins[0], bins[0] + counters * kBins, 0);
    count_digits(scores, count, shift, bits, prefix, bins);
    for (int digit = 0; counters > 1 && digit < kBins; ++digit) {
      bins[0][digit] += bins[1][digit] + bins[2][digit] + bins[3][digit];
    }
    uint32_t digit = (1u << bits) - 1;
    while (bins[0][digit] < wanted) wanted -= bins[0][digit--];
    equal = bins[0][digit];
    prefix |= digit << shift;
  }
  return {prefix, equal - wanted};
}

// Writes the positions from `first` to `last` that belong to the selection; returns the end.
SPECATTN_CLONES int32_t* list_positions(const float* scores, int64_t first, int64_t last,
                                        Threshold limit, int32_t* to) {
  for (int64_t i = first; i < last; i += kChunk) {
    const Chunk chunk(scores + i, last - i);
    uint64_t taken = chunk.where([=](uint32_t key) { return key >= limit.value; });
    for (taken &= first_bits(last - i); taken; taken &= taken - 1) {
      const int j = __builtin_ctzll(taken);
      if (chunk.keys[j] == limit.value && limit.skip-- > 0) continue;
      *to++ = static_cast<int32_t>(i + j);
    }
  }
  return to;
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
    const Threshold limit = find_threshold(scores + first, last - first, chosen);
    to = list_positions(scores, first, last, limit, to);
  }
  for (int64_t i = last; i < length; ++i) *to++ = static_cast<int32_t>(i);
  std::fill(to, end, -1);
}

}  // namespace

void run(const TopK& p, int threads) {
  const int64_t rows = p.rows_outer * p.rows_inner;
  threads = useful_threads(rows * p.capacity * kWorkPerScore, rows, threads);
  parallel(threads, rows,
           [&](int64_t i, int) { select_row(p, i / p.rows_inner, i % p.rows_inner); });
}

}  // namespace specattn
