// The query rows of a block: row r is token r / group and query head r % group of the KV head.
#pragma once

#include "keys.cuh"

DEVICE int depth_of(const Params& p, const Work& w, int t) {
  if (p.depths) return p.depths[row_offset(w, p.depths_b, 1) + t];
  return p.tree_mask ? path_of(p, w, t).length() - 1 : t + w.S - w.T;
}

// With a window row r sees the prefix's keys above lower[r].
struct Window {
  int least, most;  // over all rows

  DEVICE void measure(const Params& p, const Work& w, int* lower) {
    int low = 0x7fffffff, high = -0x7fffffff;
    for (int t = threadIdx.x % 32; t < w.T; t += 32) {
      int bound = w.length + depth_of(p, w, t) - p.window;
      low = min(low, bound);
      high = max(high, bound);
    }
    least = __reduce_min_sync(kWholeWarp, low);
    most = __reduce_max_sync(kWholeWarp, high);
    for (int r = threadIdx.x; r < kRows; r += kThreads) {
      int t = r / p.group;
      lower[r] = t < w.T ? w.length + depth_of(p, w, t) - p.window : w.length;
    }
  }
};

DEVICE u32 lowest_bits(int n) { return n >= 32 ? ~0u : (1u << max(n, 0)) - 1; }

// Which of the keys [n0, n0 + kKeys) of the prefix a row sees.
DEVICE u32 prefix_bits(const Params& p, const Work& w, const int* lower, int r, int n0) {
  u32 bits = lowest_bits(w.end - n0);
  return p.window ? bits & ~lowest_bits(lower[r] + 1 - n0) : bits;
}

DEVICE u32 tree_bits_of_row(const Params& p, const Work& w, int r, int j0) {
  if (r >= w.T * p.group) return 0;
  int t = r / p.group;
  u32 bits = tree_bits(p, w, t, j0);
  if constexpr (kKeys == 32) bits |= tree_bits(p, w, t, j0 + 16) << 16;
  return bits;
}

// Where row r begins in a tensor [B, T, Hq, ...].
DEVICE i64 place_of(const Params& p, const Work& w, int r, i64 stride_b, int stride_t,
                    int stride_h) {
  i64 t = r / p.group, h = w.head * p.group + r % p.group;
  return row_offset(w, stride_b, stride_t) + t * stride_t + h * stride_h;
}

DEVICE const u16* query_row(const Params& p, const Work& w, int r) {
  return p.q + place_of(p, w, r, p.q_b, p.q_t, p.q_h);
}

// A team of warps shares keys; each of its warps has kRowsPerWarp rows in tiles of 16.
struct Lane {
  int warp, lane, first_row;

  DEVICE Lane() {
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    first_row = warp % kTeamWarps * kRowsPerWarp;
  }
  // The rows of this lane in accumulators of tile `i`: half 0 and, eight rows further, half 1.
  DEVICE int row(int i, int half) const { return first_row + i * 16 + half * 8 + lane / 4; }
};

// The fragments of Q: in registers, or read again in every step.
struct Queries {
  u32 held[kQueriesInRegisters ? D / 16 : 1][4];
  u32 shared;

  DEVICE void load(const Params& p, const Work& w, const Lane& me, u32 memory) {
    int rows = w.T * p.group;
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int r = me.row(0, j & 1);
        const u16* row = query_row(p, w, min(r, rows - 1)) + (j >> 1) * 8 + me.lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
          held[c][j] = r < rows ? *reinterpret_cast<const u32*>(row + c * 16) : 0u;
        }
      }
    } else {
      for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
        int r = i / kColumns, c = i % kColumns;
        const u16* row = query_row(p, w, min(r, rows - 1)) + c * 8;
        copy_async(memory + r * kPitch + c * 16, row, r < rows);
      }
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
      shared = memory + (me.first_row + me.lane % 16) * kPitch + me.lane / 16 * 16;
    }
  }

  // Rows [16 i, 16 i + 16) of the warp, elements [16 c, 16 c + 16).
  DEVICE void fragment(u32 (&a)[4], int i, int c) const {
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int j = 0; j < 4; j++) a[j] = held[c][j];
    } else {
      load_matrices(a, shared + i * 16 * kPitch + c * 32);
    }
  }
};
