// merge_state and merge_states: attention states over disjoint keys become one, a warp for each
// row.
//
// Build: ELEMENT (0 bfloat16, 1 float16, 2 float32).
#include "elements.cuh"
#include "state.cuh"

struct MergeParams {
  // States [n, B, T, Hq, D] and their log-sum-exps; one more that is not stacked with them, or 0.
  const Element* outs;
  const float* lses;
  const Element* out_b;
  const float* lse_b;
  Element* out;
  float* lse;
  i64 outs_i, outs_b, outs_t, outs_h, lses_i, lses_b, lses_t, lses_h;
  i64 out_b_b, out_b_t, out_b_h, lse_b_b, lse_b_t, lse_b_h;
  i64 to_b, to_t, to_h, to_lse_b, to_lse_t, to_lse_h;
  int n, rows, T, heads, D;
};

constexpr int kWarps = 4;
constexpr int kAtOnce = 8;  // states whose loads do not wait for each other

struct States {
  const MergeParams& p;
  i64 b, t, h;

  DEVICE int count() const { return p.n + (p.out_b != nullptr); }
  DEVICE const Element* out(int i) const {
    return i < p.n ? p.outs + i * p.outs_i + b * p.outs_b + t * p.outs_t + h * p.outs_h
                   : p.out_b + b * p.out_b_b + t * p.out_b_t + h * p.out_b_h;
  }
  // In base 2; +inf, as some write it, is an empty state too.
  DEVICE float lse(int i) const {
    float x = i < p.n ? p.lses[i * p.lses_i + b * p.lses_b + t * p.lses_t + h * p.lses_h]
                      : p.lse_b[b * p.lse_b_b + t * p.lse_b_t + h * p.lse_b_h];
    return x == -minus_infinity() ? minus_infinity() : x;
  }
};

extern "C" __global__ __launch_bounds__(32 *
                                        kWarps) void merge(const __grid_constant__ MergeParams p) {
  int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  int bt = row / p.heads;
  States states{p, bt / p.T, bt % p.T, row % p.heads};

  float maximum = minus_infinity(), sum = 0.0f;
  for (int i = lane; i < states.count(); i += 32) maximum = fmaxf(maximum, states.lse(i));
  maximum = warp_max(maximum);
  float pivot = pivot_of(maximum);
  for (int i = 0; i < states.count(); i++)
    sum += exp2_approximate((states.lse(i) - pivot) * kLog2e);
  float scale = reciprocal_or_zero(sum);

  for (int d = lane * 4; d < p.D; d += 128) {
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i0 = 0; i0 < states.count(); i0 += kAtOnce) {
      float part[kAtOnce][4], lse[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        lse[i] = minus_infinity();
        if (i0 + i < states.count()) {
          lse[i] = states.lse(i0 + i);
          load_four(part[i], states.out(i0 + i) + d);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        if (lse[i] == minus_infinity()) continue;  // what it holds does not count
        float weight = exp2_approximate((lse[i] - pivot) * kLog2e) * scale;
#pragma unroll
        for (int e = 0; e < 4; e++) total[e] += weight * part[i][e];
      }
    }
    store_four(p.out + states.b * p.to_b + states.t * p.to_t + states.h * p.to_h + d, total);
  }
  __syncwarp();  // the result may lie where a state did
  if (lane == 0) {
    float lse = sum == 0.0f ? minus_infinity() : maximum + log2_approximate(sum) * kLn2;
    p.lse[states.b * p.to_lse_b + states.t * p.to_lse_t + states.h * p.to_lse_h] = lse;
  }
}
