// Deterministic top-k selection without a sort: one block for each row of scores, or for each share
// of a long one.
//
// A score's bits become an unsigned key that orders as the selection does: tokens that are always
// kept above every score, -inf and NaN below. Histograms of three digits, 11, 11 and 10 bits from
// the highest on, find the key of the last token taken, and how many of its equals are taken; one
// scan in the order of positions then writes what lies above and the latest equals. Only integers
// are counted, so no order shows.
//
// Of a row in shares each digit takes a launch, and so does the scan: blocks leave their
// histograms, and the last of a row to finish adds them up for the next launch. Nobody waits for
// another block.
#include "ptx.cuh"

struct SelectParams {
  const float* scores;
  const int* lengths;
  int *indices, *index_lengths;
  u32 *workspace, *counters;  // of rows in shares
  double ratio;               // or 0: then `budget`
  i64 scores_b, scores_h, indices_b, indices_h;
  int lengths_b, index_lengths_b, index_lengths_h;
  int width, budget, least, keep_first, keep_last;
  int share;  // scores of a block
  int step;   // of launches over shares
};

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kLoads = 8;  // of a thread under way
constexpr int kEach = 8;   // consecutive keys of a thread in a tile
constexpr int kTile = kEach * kThreads;
constexpr int kSteps = 3, kDigits = 1 << 11, kOwn = kDigits / kThreads;
constexpr double kRoundingSlack = 1e-6;  // 0.07 * 100 is 7.000000000000001 in binary

DEVICE u32 lowest_digit(u32 key, int step) { return key & (step == 2 ? 0x3ff : 0x7ff); }
DEVICE u32 digit_of(u32 key, int step) {
  return lowest_digit(key >> (step == 0 ? 21 : step == 1 ? 10 : 0), step);
}

struct Row {
  const SelectParams& p;
  const float* scores;
  int *indices, *taken;
  int length, count;

  DEVICE explicit Row(const SelectParams& p) : p(p) {
    int h = blockIdx.x, b = blockIdx.z;
    scores = p.scores + b * p.scores_b + h * p.scores_h;
    indices = p.indices + b * p.indices_b + h * p.indices_h;
    taken = p.index_lengths + b * p.index_lengths_b + h * p.index_lengths_h;
    length = p.lengths[b * p.lengths_b];
    int wanted = p.budget;
    if (p.ratio > 0.0) {  // rounded before it is compared, as in the reference
      wanted = static_cast<int>(ceil(__dsub_rn(__dmul_rn(p.ratio, length), kRoundingSlack)));
    }
    count = min(max(wanted, p.least), length);
  }
  DEVICE u32 ranked(int n, float score) const {
    if (n < p.keep_first || n >= length - p.keep_last) return 0xffffffffu;
    score = score == score ? score + 0.0f : minus_infinity();  // -0.0 ranks as 0.0
    u32 bits = __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  DEVICE void write_rest() const {
    if (blockIdx.y == 0 && threadIdx.x == 0) *taken = count;
    int i = count + blockIdx.y * kThreads + threadIdx.x;
    for (; i < p.width; i += gridDim.y * kThreads) indices[i] = -1;
  }
};

// Inclusive sum over the block; `total` receives that of all threads.
DEVICE u32 block_sum(u32 x, u32* sums, u32* total) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    u32 before = __shfl_up_sync(kWholeWarp, x, distance);
    if (lane >= distance) x += before;
  }
  __syncthreads();  // the sums before have been read
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

// The key of the last token taken, as far as it is known: `missing` of its `equals`, those that
// agree with it so far, are still to be taken, the greatest ones.
struct Last {
  u32 key;
  int missing, equals;

  // Counts the digits of keys [begin, end) that agree so far, which `histogram` receives.
  DEVICE void count(const Row& row, int begin, int end, int step, u32* histogram) const {
    int before = step == 0 ? 31 : step == 1 ? 21 : 10;
    auto add = [&](int n, float score) {
      u32 other = row.ranked(n, score);
      if (step == 0 || other >> before == key) atomicAdd(&histogram[digit_of(other, step)], 1u);
    };
    for (int i = threadIdx.x; i < kDigits; i += kThreads) histogram[i] = 0;
    __syncthreads();
    int n = begin + threadIdx.x;
    for (; n + (kLoads - 1) * kThreads < end; n += kLoads * kThreads) {
      float score[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; i++) score[i] = row.scores[n + i * kThreads];
#pragma unroll
      for (int i = 0; i < kLoads; i++) add(n + i * kThreads, score[i]);
    }
    for (; n < end; n += kThreads) add(n, row.scores[n]);
    __syncthreads();
  }

  // Adds a digit. A thread has the counts of kOwn of them, the greatest first, as threads are.
  DEVICE void add_digit(int step, const u32 (&counts)[kOwn], u32* sums) {
    __shared__ int found[3];
    u32 own = 0, total;
#pragma unroll
    for (int i = 0; i < kOwn; i++) own += counts[i];
    int upto = static_cast<int>(block_sum(own, sums, &total));
    int above = upto - static_cast<int>(own);
    if (above < missing && missing <= upto) {
#pragma unroll
      for (int i = 0; i < kOwn; i++) {
        int next = above + static_cast<int>(counts[i]);
        if (above < missing && missing <= next) {
          found[0] = kDigits - 1 - (static_cast<int>(threadIdx.x) * kOwn + i);
          found[1] = missing - above;
          found[2] = static_cast<int>(counts[i]);
        }
        above = next;
      }
    }
    __syncthreads();
    key = key << (step == 2 ? 10 : 11) | found[0];
    missing = found[1];
    equals = found[2];
  }
};

// Adds a thread's four counts of a histogram, as `add_digit` takes them.
DEVICE void add_own(u32 (&counts)[kOwn], uint4 four) {
  counts[0] += four.w, counts[1] += four.z, counts[2] += four.y, counts[3] += four.x;
}
DEVICE const uint4* own_of(const u32* histogram) {
  return reinterpret_cast<const uint4*>(histogram + kDigits) - 1 - threadIdx.x;
}

// Writes the taken ones of positions [begin, end), before which so many lay above and at the last
// key. Both are counted together in 16 bits each: a tile has fewer.
DEVICE void write_taken(const Row& row, const Last& last, int begin, int end, int above, int at,
                        u32* sums) {
  int skipped = last.equals - last.missing;
  for (int n0 = begin; n0 < end; n0 += kTile) {
    u32 key[kEach], counted = 0;
    int n = n0 + threadIdx.x * kEach;
#pragma unroll
    for (int i = 0; i < kEach; i++) key[i] = n + i < end ? row.ranked(n + i, row.scores[n + i]) : 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (n + i < end) counted += key[i] > last.key ? 1u : key[i] == last.key ? 0x10000u : 0u;
    }
    u32 total, before = block_sum(counted, sums, &total) - counted;
    int above_before = above + (before & 0xffff), at_before = at + (before >> 16);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (n + i >= end) break;
      bool greater = key[i] > last.key, equal = key[i] == last.key;
      if (greater || (equal && at_before >= skipped)) {
        row.indices[above_before + max(at_before - skipped, 0)] = n + i;
      }
      above_before += greater;
      at_before += equal;
    }
    above += total & 0xffff;
    at += total >> 16;
  }
}

// A row's part of the workspace.
struct Shares {
  u32* histograms;  // [shares, kDigits]
  u32 *above, *at;  // [shares]: keys above and at the last one, as far as it is known
  Last* last;

  DEVICE explicit Shares(const SelectParams& p) {
    i64 shares = gridDim.y, row = blockIdx.z * gridDim.x + blockIdx.x;
    histograms = p.workspace + row * shares * kDigits;
    above = p.workspace + gridDim.x * gridDim.z * shares * kDigits + row * (2 * shares + 3);
    at = above + shares;
    last = reinterpret_cast<Last*>(at + shares);
  }

  // Adds a step's digit, by the histograms of all shares.
  DEVICE void add_up(int live, int step, Last found, u32* sums) const {
    u32 counts[kOwn] = {};
#pragma unroll 8
    for (int s = 0; s < live; s++) add_own(counts, __ldcg(own_of(histograms + s * kDigits)));
    found.add_digit(step, counts, sums);
    u32 digit = lowest_digit(found.key, step);
    for (int s = threadIdx.x / 32; s < live; s += kWarps) {
      const u32* histogram = histograms + s * kDigits;
      u32 greater = 0;
      for (u32 i = digit + 1 + threadIdx.x % 32; i < kDigits; i += 32) {
        greater += __ldcg(histogram + i);
      }
      greater = __reduce_add_sync(kWholeWarp, greater);
      if (threadIdx.x % 32 == 0) {
        above[s] = greater + (step ? above[s] : 0);
        at[s] = __ldcg(histogram + digit);
      }
    }
    if (threadIdx.x == 0) *last = found;
  }
};

DEVICE void select_row(const Row& row, u32* histogram, u32* sums) {
  Last last{0, row.count, 0};
#pragma unroll 1
  for (int step = 0; step < kSteps; step++) {
    u32 counts[kOwn] = {};
    last.count(row, 0, row.length, step, histogram);
    add_own(counts, *own_of(histogram));
    last.add_digit(step, counts, sums);
  }
  write_taken(row, last, 0, row.length, 0, 0, sums);
}

// One step of a share's: a digit, or the scan.
DEVICE void select_share(const Row& row, u32* histogram, u32* sums) {
  const SelectParams& p = row.p;
  int share = blockIdx.y, live = (row.length + p.share - 1) / p.share;
  if (share >= live) return;
  int begin = share * p.share, end = min(begin + p.share, row.length);
  Shares shares(p);
  Last last = p.step == 0 ? Last{0, row.count, 0} : *shares.last;
  if (p.step == kSteps) {
    u32 above = 0, at = 0;  // before this share
    for (int s = threadIdx.x; s < share; s += kThreads) {
      above += shares.above[s];
      at += shares.at[s];
    }
    block_sum(above, sums, &above);
    block_sum(at, sums, &at);
    write_taken(row, last, begin, end, above, at, sums);
    return;
  }
  last.count(row, begin, end, p.step, histogram);
  u32* mine = shares.histograms + share * kDigits;
  for (int i = threadIdx.x; i < kDigits; i += kThreads) mine[i] = histogram[i];
  u32* counter = p.counters + blockIdx.z * gridDim.x + blockIdx.x;
  if (is_last(counter, live)) shares.add_up(live, p.step, last, sums);
}

extern "C" __global__ __launch_bounds__(kThreads) void select_topk(
    const __grid_constant__ SelectParams p) {
  __shared__ __align__(16) u32 histogram[kDigits];
  __shared__ u32 sums[kWarps];
  Row row(p);
  if (gridDim.y == 1 || p.step == kSteps) row.write_rest();
  if (row.count == 0) return;
  if (gridDim.y == 1) {
    select_row(row, histogram, sums);
  } else {
    select_share(row, histogram, sums);
  }
}
