// Attention of up to 64 query rows per KV head to a cached prefix and a tree, in one launch.
//
// The grid is (KV head, slot, request). A request's keys are cut into slots by its own length; slot
// 0 begins with the sinks and the tree. In a block every team of warps has keys of its own, its own
// copies under way, and its own softmax: no barrier of the block stands in the loop. The teams'
// states are merged, and those of a head's slots by whichever blocks come last (combine.cuh).
//
// Build: ELEMENT, HEAD_DIM, ROWS, STAGES (shape.cuh), LOOKUP (tables stand between a key's number
// and its address), COLLECT (0 nothing, 1 scores, 2 logits), BLOCKS (that an SM shall hold).
#include "collect.cuh"
#include "combine.cuh"

constexpr Collect kCollect = static_cast<Collect>(COLLECT);

// softcap * tanh(x / softcap), by its series where the closed form cancels.
DEVICE float cap(float x, float softcap) {
  float y = x / softcap, square = y * y;
  float e = exp2_approximate(fabsf(y) * (-2.0f * kLog2e));
  float closed = copysignf((1.0f - e) / (1.0f + e), y);
  float series = y * (1.0f - square * (1.0f / 3 - square * (2.0f / 15 - square * (17.0f / 315))));
  return softcap * (square < 0.01f ? series : closed);
}

DEVICE float sink_of(const Params& p, int h) {
  if (p.sink_type == 0) return static_cast<const float*>(p.sinks)[h];
  u16 bits = static_cast<const u16*>(p.sinks)[h];
  return p.sink_type == 1 ? from_bfloat16(bits) : from_float16(bits);
}

// A warp's rows while it attends.
struct Rows {
  float out[kTiles][kColumns][4];
  RowState state[kTiles][2];

  DEVICE void begin(const Params& p, const Work& w, const Lane& me) {
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int c = 0; c < kColumns; c++)
        out[i][c][0] = out[i][c][1] = out[i][c][2] = out[i][c][3] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        state[i][half].begin();
        int r = me.row(i, half);
        if (p.sinks && w.slot == 0 && me.warp < kTeamWarps && r < w.T * p.group) {
          state[i][half].maximum = sink_of(p, w.head * p.group + r % p.group) * kLog2e;
          // A sink of -inf is no key.
          state[i][half].sum =
              me.lane % 4 == 0 && state[i][half].maximum != minus_infinity() ? 1.0f : 0.0f;
        }
      }
    }
  }

  // x [16 * kTiles, kKeys] becomes what the logits weigh; their base-2 form is x * factor.
  DEVICE void softmax(Logits& x, float factor) {
    float most[kTiles][2];
    bool exceeded = false;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        most[i][half] = fmaxf(x[i][0][2 * half], x[i][0][2 * half + 1]);
#pragma unroll
        for (int j = 1; j < kKeys / 8; j++) {
          most[i][half] = fmaxf(most[i][half], fmaxf(x[i][j][2 * half], x[i][j][2 * half + 1]));
        }
        most[i][half] *= factor;
        exceeded |= state[i][half].exceeded_by(most[i][half]);
      }
    }
    if (__any_sync(kWholeWarp, exceeded)) raise(most);
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float pivot = pivot_of(state[i][half].maximum);
#pragma unroll
        for (int j = 0; j < kKeys / 8; j++) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; e++) {
            x[i][j][e] = exp2_approximate(fmaf(x[i][j][e], factor, -pivot));
            state[i][half].sum += x[i][j][e];
          }
        }
      }
    }
  }

  DEVICE void raise(float (&most)[kTiles][2]) {
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; half++)
        shrink[half] = state[i][half].raise(quad_max(most[i][half]));
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) out[i][c][e] *= shrink[e / 2];
      }
    }
  }
};

// Q K^T of a warp's rows with the keys of a stage.
DEVICE void score(const Queries& queries, u32 keys, Logits& x) {
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
#pragma unroll
    for (int j = 0; j < kKeys / 8; j++) x[i][j][0] = x[i][j][1] = x[i][j][2] = x[i][j][3] = 0.0f;
  }
#pragma unroll
  for (int c = 0; c < D / 16; c++) {
    u32 q[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; i++) queries.fragment(q[i], i, c);
#pragma unroll
    for (int j = 0; j < kKeys / 16; j++) {
      u32 k[4];
      load_matrices(k, keys + j * 16 * kPitch + c * 32);
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        multiply_add(x[i][2 * j], q[i], k[0], k[1]);
        multiply_add(x[i][2 * j + 1], q[i], k[2], k[3]);
      }
    }
  }
}

// Makes NaN of the logits of keys whose values are none: then rows that see them say NaN.
DEVICE void poison(Logits& x, u32 no_number, const Lane& me) {
  if (no_number == 0) return;
  no_number >>= me.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kKeys / 8; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        if (no_number >> (j * 8 + e) & 1) x[i][j][e] = x[i][j][e + 2] = not_a_number();
      }
    }
  }
}

// out += P V with the values of a stage.
DEVICE void add_values(float (&out)[kTiles][kColumns][4], u32 values, Logits& x) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; j++) {
    u32 weights[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++)
        weights[i][e] = pack(x[i][2 * j + e / 2][e % 2 * 2], x[i][2 * j + e / 2][e % 2 * 2 + 1]);
    }
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
      u32 v[4];
      load_matrices_transposed(v, values + j * 16 * kPitch + c * 32);
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        multiply_add(out[i][2 * c], weights[i], v[0], v[1]);
        multiply_add(out[i][2 * c + 1], weights[i], v[2], v[3]);
      }
    }
  }
}

// Merges the teams' states, in their order, and writes this slot's: the result where it is the
// only.
DEVICE void finish(const Params& p, const Work& w, const Lane& me, Rows& rows, float* shared) {
  int team = me.warp / kTeamWarps, thread = threadIdx.x % kTeamThreads;
  float4* outs = reinterpret_cast<float4*>(shared);  // [teams, tiles, columns, threads of a team]
  float* maxima = shared + kTeams * kRows * D;       // [teams, rows]
  float* sums = maxima + kTeams * kRows;
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      float (&o)[4] = rows.out[i][c];
      outs[((team * kTiles + i) * kColumns + c) * kTeamThreads + thread] =
          make_float4(o[0], o[1], o[2], o[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = quad_sum(rows.state[i][half].sum);
      if (me.lane % 4 == 0) {
        maxima[team * kRows + me.row(i, half)] = rows.state[i][half].maximum;
        sums[team * kRows + me.row(i, half)] = sum;
      }
    }
  }
  __syncthreads();
  Partials partials(p, w);
  Output output{p, w, partials, w.slot, w.live == 1};
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    float weight[2][kTeams];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int r = me.row(i, half);
      float maximum = minus_infinity(), sum = 0.0f;
#pragma unroll
      for (int t = 0; t < kTeams; t++) maximum = fmaxf(maximum, maxima[t * kRows + r]);
#pragma unroll
      for (int t = 0; t < kTeams; t++) {
        weight[half][t] = exp2_approximate(maxima[t * kRows + r] - pivot_of(maximum));
        sum += weight[half][t] * sums[t * kRows + r];
      }
      float scale = reciprocal_or_zero(sum);
#pragma unroll
      for (int t = 0; t < kTeams; t++) weight[half][t] *= scale;
      if (r < output.rows() && team == 0 && me.lane % 4 == 0) {
        output.write_lse(r, log_sum(maximum, sum));
      }
    }
    for (int c = team; c < kColumns; c += kTeams) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int t = 0; t < kTeams; t++) {
        float4 o = outs[((t * kTiles + i) * kColumns + c) * kTeamThreads + thread];
        sum[0] += weight[0][t] * o.x;
        sum[1] += weight[0][t] * o.y;
        sum[2] += weight[1][t] * o.z;
        sum[3] += weight[1][t] * o.w;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int r = me.row(i, half), column = c * 8 + me.lane % 4 * 2;
        if (r < output.rows()) output.write(r, column, sum[2 * half], sum[2 * half + 1]);
      }
    }
  }
}

DEVICE Work work_of(const Params& p) {
  Work w;
  w.head = blockIdx.x;
  w.slot = blockIdx.y;
  w.b = blockIdx.z;
  w.T = p.T;
  w.S = p.S;
  w.first_row = 0;
  w.ragged = p.cu_seqlens_q != nullptr;
  if (w.ragged) {
    w.first_row = p.cu_seqlens_q[w.b];
    w.S = w.T = p.cu_seqlens_q[w.b + 1] - static_cast<int>(w.first_row);
  }
  w.length = w.listed = 0;
  if (p.lengths) {
    w.length = w.listed = p.lengths[w.b * p.lengths_b + w.head * p.lengths_h];
    if (p.cache_seqlens && w.listed < 0) w.length = p.cache_seqlens[w.b * p.cache_seqlens_b];
    if (w.T == 0) w.length = 0;  // who has no row sees and collects nothing
  }
  int begin = p.window ? max(w.length - p.window, 0) : 0;  // no row sees a key before this one
  int size = split_size(p.split, w.length - begin, gridDim.y);
  w.live = max(1, (w.length - begin + size - 1) / size);
  w.begin = begin + w.slot * size;
  w.end = min(w.begin + size, w.length);
  w.tree_tiles = w.slot == 0 && p.tree ? (w.S + kKeys - 1) / kKeys : 0;
  return w;
}

extern "C" __global__ __launch_bounds__(kThreads,
                                        BLOCKS) void decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ int lower[kRows];
  __shared__ float
      parts[kCollect == kScores && kTeamWarps > 1 ? kTeams * 2 * kTeamWarps * kKeys : 1];
  Work w = work_of(p);
  if constexpr (kCollect != kNothing) {  // all slots write what no row sees of the cache
    fill_share<kCollect>(p, w, 0, p.window ? max(w.length - p.window, 0) : 0);
    fill_share<kCollect>(p, w, w.length, p.capacity);
  }
  if (w.slot >= w.live || w.T == 0) return;
  Lane me;
  Window window{-1, -1};
  if (p.window) {
    window.measure(p, w, lower);
    int first = max(w.begin, window.least + 1);  // no row sees a key before this one
    if constexpr (kCollect != kNothing) fill_empty<kCollect>(p, w, w.begin, min(first, w.end));
    w.begin = first;
    __syncthreads();  // the rows' bounds are written
  }

  Rows rows;
  rows.begin(p, w, me);
  Queries queries;
  u32 shared = shared_address(memory);
  queries.load(p, w, me, shared);
  Collector<kCollect> collector;
  collector.begin(p, w, me, parts);

  int team = me.warp / kTeamWarps;
  int tiles = w.tree_tiles + max(0, (w.end - w.begin + kKeys - 1) / kKeys);
  // Of these rows see different keys: the tree's, and with a window the first of the prefix.
  int differing = w.tree_tiles;
  if (w.begin <= window.most) differing += (window.most - w.begin) / kKeys + 1;
  u32 pipeline = shared + kQueryBytes;
  Keys<LOOKUP> keys(p, w, team, pipeline);
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) keys.copy_next(i, tiles);
  float scale = p.softcap > 0.0f ? 1.0f : p.scale;  // of the logits as they are once capped
  // Where this lane's rows of the matrices begin, in stage 0.
  u32 first_stage = pipeline + team * kStages * kStageBytes;
  u32 key_matrices =
      kept(first_stage + (me.lane % 8 + me.lane / 16 * 8) * kPitch + me.lane / 8 % 2 * 16);
  u32 value_matrices = kept(first_stage + kKeyBytes + me.lane % 16 * kPitch + me.lane / 16 * 16);
  int stage = 0;
  for (int tile = team; tile < tiles; tile += kTeams) {
    wait_for_copies<kStages - 2>();
    bool differ = tile < differing;
    if (differ) keys.clean_values(stage);
    team_barrier<kTeamThreads>(
        team);  // what all have copied is here; all have read the stage before
    collector.flush(p, w, me);
    keys.copy_next(stage == 0 ? kStages - 1 : stage - 1, tiles);

    Logits x;
    score(queries, key_matrices + stage * kStageBytes, x);
    if (p.softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
#pragma unroll
        for (int j = 0; j < kKeys / 8; j++) {
#pragma unroll
          for (int e = 0; e < 4; e++) x[i][j][e] = cap(x[i][j][e] * p.scale, p.softcap);
        }
      }
    }
    bool in_tree = tile < w.tree_tiles;
    int n0 = in_tree ? tile * kKeys : keys.first_key(tile);
    if (!in_tree) collector.take(p, w, me, x, scale, n0, lower);
    if (differ || n0 + kKeys > w.end) {
      if (differ) poison(x, keys_of_no_number(first_stage + stage * kStageBytes, me.lane), me);
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int r = me.row(i, half);
          u32 seen = in_tree ? tree_bits_of_row(p, w, r, n0) : prefix_bits(p, w, lower, r, n0);
          seen >>= me.lane % 4 * 2;
#pragma unroll
          for (int j = 0; j < kKeys / 8; j++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
              if (!(seen >> (j * 8 + e) & 1)) x[i][j][2 * half + e] = minus_infinity();
            }
          }
        }
      }
    }
    rows.softmax(x, scale * kLog2e);
    add_values(rows.out, value_matrices + stage * kStageBytes, x);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  __syncthreads();  // every tile has been waited for
  collector.flush(p, w, me);
  finish(p, w, me, rows, reinterpret_cast<float*>(memory));
  if (w.live > 1) combine(p, w, p.counters_per_head);
}
