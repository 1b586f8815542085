// What is handed out of the logits of the prefix: some rows' own, or their mean over rows and
// heads.
#pragma once

#include "rows.cuh"

enum Collect { kNothing, kScores, kLogits };

// Which token the i-th collected row is; a short ragged request has its nearest one.
DEVICE int collected_token(const Params& p, const Work& w, int i) {
  int t = p.collected_rows[i];
  return max(0, min(t < 0 ? w.T + t : t, w.T - 1));
}

using Logits = float[kTiles][kKeys / 8][4];

template <Collect KIND>
struct Collector {
  DEVICE void begin(const Params&, const Work&, const Lane&, float*) {}
  DEVICE void take(const Params&, const Work&, const Lane&, const Logits&, float, int, const int*) {
  }
  DEVICE void flush(const Params&, const Work&, const Lane&) {}
};

// Writes -inf to the columns [from, to) of every row that this head collects.
template <class Element>
DEVICE void fill(const Params& p, const Work& w, int rows, int from, int to, Element nothing) {
  for (int i = 0; i < rows; i++) {
    Element* row = static_cast<Element*>(p.collected) + w.b * p.collected_b;
    row += sizeof(Element) == 4
               ? w.head * p.collected_h
               : i / p.group * p.collected_r + (w.head * p.group + i % p.group) * p.collected_h;
    for (int n = from + threadIdx.x; n < to; n += kThreads) row[n] = nothing;
  }
}

template <Collect KIND>
DEVICE void fill_empty(const Params& p, const Work& w, int from, int to) {
  if constexpr (KIND == kScores) {
    fill(p, w, 1, from, to, minus_infinity());
  } else if constexpr (KIND == kLogits) {
    fill(p, w, p.num_collected * p.group, from, to, static_cast<u16>(0xff80));
  }
}

// One slot's share of the positions [from, to), which all slots of a head fill together.
template <Collect KIND>
DEVICE void fill_share(const Params& p, const Work& w, int from, int to) {
  int share = (to - from + gridDim.y - 1) / gridDim.y;
  from += w.slot * share;
  fill_empty<KIND>(p, w, from, min(from + share, to));
}

// Scores: what a lane's rows count, summed over a column's rows in a fixed order. A team of several
// warps adds its parts up one step later, behind the barrier that its pipeline has anyway.
template <>
struct Collector<kScores> {
  float weight[kTiles][2];
  float* parts;  // [2, kTeamWarps, kKeys] of the team
  int lower;     // a key must be visible to all collected rows
  int pending;   // first key of the tile whose parts wait, or -1
  int step;

  DEVICE void begin(const Params& p, const Work& w, const Lane& me, float* shared) {
    parts = shared + me.warp / kTeamWarps * 2 * kTeamWarps * kKeys;
    lower = -1;
    pending = -1;
    step = 0;
    float share = 1.0f / static_cast<float>(p.num_collected * p.group);
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int r = me.row(i, half), times = 0;
        if (r < w.T * p.group) {
          for (int c = 0; c < p.num_collected; c++)
            times += collected_token(p, w, c) == r / p.group;
        }
        weight[i][half] = times * share;
      }
    }
    if (p.window && w.T > 0) {
      int depth = 0;
      for (int c = 0; c < p.num_collected; c++)
        depth = max(depth, depth_of(p, w, collected_token(p, w, c)));
      lower = w.length + depth - p.window;
    }
  }

  DEVICE void store(const Params& p, const Work& w, int n, float score) const {
    float* row = static_cast<float*>(p.collected) + w.b * p.collected_b + w.head * p.collected_h;
    if (n < w.end) row[n] = n > lower ? score : minus_infinity();
  }

  // x: the logits [kTiles * 16, kKeys] of the keys from n0 on, before `scale`.
  DEVICE void take(const Params& p, const Work& w, const Lane& me, const Logits& x, float scale,
                   int n0, const int*) {
    float column[kKeys / 4];  // this lane's: two of every eight
#pragma unroll
    for (int j = 0; j < kKeys / 4; j++) {
      column[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float y = x[i][j / 2][j % 2 + 2 * half] * scale;
          // What is not collected may be NaN.
          column[j] += weight[i][half] == 0.0f ? 0.0f : y * weight[i][half];
        }
      }
    }
    if constexpr (kTeamWarps > 1) {
      pending = n0;
      step++;
    }
    // Half of the columns go to each half of the lanes, until each has some for itself.
    int first = 0;
#pragma unroll
    for (int distance = 16, count = kKeys / 4; distance >= 4;
         distance /= 2, count /= count > 1 ? 2 : 1) {
      bool upper = me.lane & distance;
      if (count > 1) {
#pragma unroll
        for (int j = 0; j < count / 2; j++) {
          float sent = upper ? column[j] : column[j + count / 2];
          float kept = upper ? column[j + count / 2] : column[j];
          column[j] = kept + __shfl_xor_sync(kWholeWarp, sent, distance);
        }
        first += upper ? count / 2 : 0;
      } else {
        column[0] += __shfl_xor_sync(kWholeWarp, column[0], distance);
      }
    }
    constexpr bool kShared = kKeys == 16;  // two lanes of those four bits have the same column
    if (kShared && me.lane & 4) return;
    int n = first / 2 * 8 + me.lane % 4 * 2 + first % 2;
    if constexpr (kTeamWarps == 1) {
      store(p, w, n0 + n, column[0]);
    } else {
      parts[((step - 1) % 2 * kTeamWarps + me.warp % kTeamWarps) * kKeys + n] = column[0];
    }
  }

  // Behind a barrier of the team.
  DEVICE void flush(const Params& p, const Work& w, const Lane& me) {
    if constexpr (kTeamWarps > 1) {
      if (pending >= 0 && me.warp % kTeamWarps == 0 && me.lane < kKeys) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < kTeamWarps; i++) {
          score += parts[((step - 1) % 2 * kTeamWarps + i) * kKeys + me.lane];
        }
        store(p, w, pending + me.lane, score);
      }
      pending = -1;
    }
  }
};

template <>
struct Collector<kLogits> {
  DEVICE void begin(const Params&, const Work&, const Lane&, float*) {}
  DEVICE void flush(const Params&, const Work&, const Lane&) {}
  DEVICE void take(const Params& p, const Work& w, const Lane& me, const Logits& x, float scale,
                   int n0, const int* lower) {
    int rows = w.T * p.group;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int r = me.row(i, half), t = r / p.group, h = w.head * p.group + r % p.group;
        if (r < rows) {
          int least = p.window ? lower[r] : -1;
          for (int c = 0; c < p.num_collected; c++) {
            if (collected_token(p, w, c) != t) continue;
            u16* row = static_cast<u16*>(p.collected) + w.b * p.collected_b + c * p.collected_r +
                       h * p.collected_h;
#pragma unroll
            for (int j = 0; j < kKeys / 8; j++) {
              int n = n0 + j * 8 + me.lane % 4 * 2;
              float a = n > least ? x[i][j][2 * half] * scale : minus_infinity();
              float b = n + 1 > least ? x[i][j][2 * half + 1] * scale : minus_infinity();
              u32 both = pack_bfloat16(a, b);
              if (n < w.end) row[n] = static_cast<u16>(both);
              if (n + 1 < w.end) row[n + 1] = static_cast<u16>(both >> 16);
            }
          }
        }
      }
    }
  }
};
