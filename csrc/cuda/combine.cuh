// The states of one head's slots become one, in a fixed order: eight by eight, by whoever comes
// last.
#pragma once

#include "rows.cuh"
#include "state.cuh"

constexpr int kFanIn = 8;

// The slots' states in the workspace.
struct Partials {
  float *out, *lse;  // of slot 0

  DEVICE Partials(const Params& p, const Work& w) {
    i64 head = static_cast<i64>(w.b) * gridDim.x + w.head,
        states = static_cast<i64>(gridDim.z) * gridDim.x * gridDim.y;
    out = p.partials + head * gridDim.y * kRows * D;
    lse = p.partials + states * kRows * D + head * gridDim.y * kRows;
  }
  DEVICE float* out_of(int slot, int r) const {
    return out + (static_cast<i64>(slot) * kRows + r) * D;
  }
  DEVICE float* lse_of(int slot, int r) const { return lse + static_cast<i64>(slot) * kRows + r; }
};

// Where a state goes: to the result if it is `whole`, or else to a slot of the workspace.
struct Output {
  const Params& p;
  const Work& w;
  const Partials& partials;
  int slot;
  bool whole;

  DEVICE int rows() const { return w.T * p.group; }
  DEVICE void write(int r, int column, float a, float b) const {
    if (whole) {
      u16* row = p.out + place_of(p, w, r, p.out_b, p.out_t, p.out_h);
      *reinterpret_cast<u32*>(row + column) = pack(a, b);
    } else {
      *reinterpret_cast<float2*>(partials.out_of(slot, r) + column) = make_float2(a, b);
    }
  }
  DEVICE void write_lse(int r, float lse) const {  // in base 2
    if (whole) {
      p.lse[place_of(p, w, r, p.lse_b, p.lse_t, p.lse_h)] = lse * kLn2;
    } else {
      *partials.lse_of(slot, r) = lse;
    }
  }
};

// What the states of slots [first, first + count * stride) weigh in row r; returns their
// log-sum-exp.
DEVICE float weights_of(const Partials& partials, int first, int stride, int count, int r,
                        float (&weight)[kFanIn]) {
  float maximum = minus_infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kFanIn; i++) {
    weight[i] = i < count ? __ldcg(partials.lse_of(first + i * stride, r)) : minus_infinity();
  }
#pragma unroll
  for (int i = 0; i < kFanIn; i++) maximum = fmaxf(maximum, weight[i]);
  float pivot = pivot_of(maximum);
#pragma unroll
  for (int i = 0; i < kFanIn; i++) {
    weight[i] = exp2_approximate(weight[i] - pivot);
    sum += weight[i];
  }
  float scale = reciprocal_or_zero(sum);
#pragma unroll
  for (int i = 0; i < kFanIn; i++) weight[i] *= scale;
  return log_sum(maximum, sum);
}

// The first of them receives the merged state, if it is not the result.
DEVICE void merge_states(const Output& output, int stride, int count) {
  const Partials& partials = output.partials;
  int first = output.slot;
  constexpr int kFours = D / 4;
  float weight[kFanIn];
  for (int i = threadIdx.x; i < output.rows() * kFours; i += kThreads) {
    int r = i / kFours, column = i % kFours * 4;
    float4 part[kFanIn], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < kFanIn; s++) {
      part[s] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (s < count)
        part[s] = __ldcg(
            reinterpret_cast<const float4*>(partials.out_of(first + s * stride, r) + column));
    }
    weights_of(partials, first, stride, count, r, weight);
#pragma unroll
    for (int s = 0; s < kFanIn; s++) {
      sum.x += weight[s] * part[s].x;
      sum.y += weight[s] * part[s].y;
      sum.z += weight[s] * part[s].z;
      sum.w += weight[s] * part[s].w;
    }
    output.write(r, column, sum.x, sum.y);
    output.write(r, column + 2, sum.z, sum.w);
  }
  __syncthreads();  // before the first log-sum-exp makes room for that of all
  for (int r = threadIdx.x; r < output.rows(); r += kThreads) {
    output.write_lse(r, weights_of(partials, first, stride, count, r, weight));
  }
}

// Behind this block's own state: merges as long as it is the last of eight.
DEVICE void combine(const Params& p, const Work& w, int counters_per_head) {
  u32* counter = p.counters + (static_cast<i64>(w.b) * gridDim.x + w.head) * counters_per_head;
  Partials partials(p, w);
  for (int states = w.live, index = w.slot, stride = 1; states > 1; stride *= kFanIn) {
    int groups = (states + kFanIn - 1) / kFanIn, group = index / kFanIn;
    int count = min(kFanIn, states - group * kFanIn);
    if (count > 1) {
      if (!is_last(counter + group, count)) return;
      Output output{p, w, partials, group * kFanIn * stride, groups == 1};
      merge_states(output, stride, count);
    }
    counter += groups;
    states = groups;
    index = group;
  }
}
