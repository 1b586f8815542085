// Deterministic top-k selection without a sort: one block for each row of scores.
//
// A score's bits become an unsigned key that orders as the selection does: tokens that are always
// kept above every score, -inf and NaN below. Four histograms of eight bits each find the key of
// the last token taken, and how many of its equals are taken; one scan in the order of positions
// then writes what lies above and the latest equals. Only integers are counted, so no order shows.
// Keys of rows that fit stay in shared memory, so their scores are read once.
//
// Build: HELD (whether the keys of a row fit).
#include "ptx.cuh"

struct SelectParams {
  const float* scores;
  const int* lengths;
  int *indices, *index_lengths;
  double ratio;  // or 0: then `budget`
  i64 scores_b, scores_h, indices_b, indices_h;
  int lengths_b, index_lengths_b, index_lengths_h;
  int heads, width, budget, least, keep_first, keep_last;
};

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kEach = 4;  // consecutive keys of a thread in a tile
constexpr int kTile = kEach * kThreads;
constexpr int kDigits = 256;
constexpr double kRoundingSlack = 1e-6;  // 0.07 * 100 is 7.000000000000001 in binary

struct Row {
  const SelectParams& p;
  const float* scores;
  u32* held;
  int length;

  DEVICE u32 ranked(int n) const {
    if (n < p.keep_first || n >= length - p.keep_last) return 0xffffffffu;
    float score = scores[n];
    score = score == score ? score + 0.0f : minus_infinity();  // -0.0 ranks as 0.0
    u32 bits = __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  DEVICE u32 key(int n) const { return HELD ? held[n] : ranked(n); }
};

// Inclusive sum over the block; `total` receives that of all threads.
DEVICE u32 block_sum(u32 x, u32* sums, u32* total) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    u32 before = __shfl_up_sync(kWholeWarp, x, distance);
    if (lane >= distance) x += before;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  u32 all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; i++) {
    if (i < warp) x += sums[i];
    all += sums[i];
  }
  *total = all;
  return x;
}

// The digit of the last key taken: `missing` of the keys counted, the greatest ones, are still to
// be taken. It becomes how many of those with this digit are; returns how many have it.
DEVICE int find_digit(const u32* histogram, u32* sums, int* missing, u32* digit) {
  __shared__ int found[3];
  int mine = kDigits - 1 - static_cast<int>(threadIdx.x);  // from the greatest digit down
  u32 count = mine >= 0 ? histogram[mine] : 0, total;
  int upto = static_cast<int>(block_sum(count, sums, &total)),
      above = upto - static_cast<int>(count);
  if (mine >= 0 && above < *missing && *missing <= upto) {
    found[0] = mine;
    found[1] = *missing - above;
    found[2] = static_cast<int>(count);
  }
  __syncthreads();
  *digit = found[0];
  *missing = found[1];
  return found[2];
}

extern "C" __global__ __launch_bounds__(kThreads) void select_topk(
    const __grid_constant__ SelectParams p) {
  extern __shared__ u32 held[];
  __shared__ u32 histogram[kDigits], sums[kWarps];
  int b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
  int length = p.lengths[b * p.lengths_b];
  Row row{p, p.scores + b * p.scores_b + h * p.scores_h, held, length};
  int wanted = p.budget;
  if (p.ratio > 0.0) {  // rounded before it is compared, as in the reference
    wanted = static_cast<int>(ceil(__dsub_rn(__dmul_rn(p.ratio, length), kRoundingSlack)));
  }
  int count = min(max(wanted, p.least), length);
  int* indices = p.indices + b * p.indices_b + h * p.indices_h;
  if (threadIdx.x == 0) p.index_lengths[b * p.index_lengths_b + h * p.index_lengths_h] = count;
  for (int i = count + threadIdx.x; i < p.width; i += kThreads) indices[i] = -1;
  if (count == 0) return;

  if constexpr (HELD) {
    for (int n = threadIdx.x; n < length; n += kThreads) held[n] = row.ranked(n);
  }
  u32 last = 0;  // the key of the last token taken, as far as it is known
  int missing = count, equals = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    if (threadIdx.x < kDigits) histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int n = threadIdx.x; n < length; n += kThreads) {
      u32 key = row.key(n);
      if (shift == 24 || key >> (shift + 8) == last) atomicAdd(&histogram[key >> shift & 0xff], 1u);
    }
    __syncthreads();
    u32 digit;
    equals = find_digit(histogram, sums, &missing, &digit);
    last = last << 8 | digit;
  }

  // Above and at the last key, counted together in 16 bits each: a tile has fewer.
  int above = 0, at = 0, skipped = equals - missing;
  for (int n0 = 0; n0 < length; n0 += kTile) {
    u32 key[kEach], counted = 0;
    int n = n0 + threadIdx.x * kEach;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      key[i] = n + i < length ? row.key(n + i) : 0;
      if (n + i < length) counted += key[i] > last ? 1u : key[i] == last ? 0x10000u : 0u;
    }
    u32 total, before = block_sum(counted, sums, &total) - counted;
    int above_before = above + (before & 0xffff), at_before = at + (before >> 16);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (n + i >= length) break;
      bool greater = key[i] > last, equal = key[i] == last;
      if (greater || (equal && at_before >= skipped)) {
        indices[above_before + max(at_before - skipped, 0)] = n + i;
      }
      above_before += greater;
      at_before += equal;
    }
    above += total & 0xffff;
    at += total >> 16;
  }
}
