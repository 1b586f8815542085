// What a launch of `decode` is told. `backends/cuda` packs the same fields in the same order.
#pragma once

#include "ptx.cuh"

constexpr int kMostCollected = 64;

struct Split {
  int wanted, least, most;  // as `_configs.Splits` of the Triton kernels has them
};

struct Params {
  // Addresses; 0 where a call has no such tensor.
  const u16 *q, *k_cache, *v_cache, *k_tree, *v_tree;
  const int *lengths, *cache_seqlens, *indices, *block_table;
  const u32* tree_mask;  // words of 32 keys
  const int *depths, *cu_seqlens_q;
  const void* sinks;
  u16* out;
  float* lse;
  void* collected;
  float* partials;  // [B, Hk, slots, M, D], then their log-sum-exps [B, Hk, slots, M]
  u32* counters;    // [B, Hk, counters], all 0 between launches
  // Strides in elements.
  i64 q_b, k_b, k_h, v_b, v_h, k_tree_b, k_tree_h, v_tree_b, v_tree_h, out_b, lse_b;
  i64 collected_b, collected_r, collected_h, indices_b, indices_h;
  int q_t, q_h, k_n, v_n, k_tree_n, v_tree_n, out_t, out_h, lse_t, lse_h;
  int lengths_b, lengths_h, cache_seqlens_b, table_b, mask_b, mask_t, depths_b;
  // Sizes.
  int T, S, group, page_size, capacity, window;  // capacity: columns of `collected`
  u32 page_magic, page_shift;                    // n / page_size is n * magic >> shift
  Split split;
  int tree;       // 0: none, 1: keys of its own, 2: behind the prefix in the cache
  int sink_type;  // 0: float32, 1: bfloat16, 2: float16
  float scale, softcap;
  int num_collected, counters_per_head;
  signed char collected_rows[kMostCollected];  // tokens, negative ones from the last
};
