/* The CPU kernels of specattn for C and C++, over tensors as DLPack describes them.
 *
 * Every function returns SPECATTN_OK, or another status with a message in specattn_error(). Outputs
 * are written in place; nothing is allocated but workspaces. A null tensor is an argument that is
 * left out. Shapes, dtypes and what each argument means: https://specattn.readthedocs.io, where the
 * functions of the same names have these arguments; `threads` is how many threads may share a call.
 *
 * Tensors lie on the CPU, `strides` count elements and may be null (contiguous), and the last
 * dimension is dense. float32, bfloat16, float16; caches also int8, float8_e4m3fn, float8_e5m2.
 */
#ifndef SPECATTN_H_
#define SPECATTN_H_

#include <stdint.h>

/* DLPack's own header, if there is one; else what it declares of a tensor. */
#if defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#endif
#ifndef DLPACK_DLPACK_H_
typedef struct {
  int32_t device_type; /* 1: the CPU */
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 10 float8_e4m3fn, 12 float8_e5m2 */
  uint8_t bits;
  uint16_t lanes; /* 1 */
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;
#endif

#if defined(__GNUC__)
#define SPECATTN_API __attribute__((visibility("default")))
#else
#define SPECATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  SPECATTN_OK = 0,
  SPECATTN_INVALID = 1,      /* a tensor or a number that the function does not take */
  SPECATTN_OUT_OF_RANGE = 2, /* a length, page or index that points outside of what was given */
  SPECATTN_FAILED = 3        /* anything else, such as no memory */
} specattn_status;

/* What went wrong in this thread's last call that failed. */
SPECATTN_API const char* specattn_error(void);
/* The code path in use: "avx2", ...; and another one, for comparisons, while no call runs. */
SPECATTN_API const char* specattn_isa(void);
SPECATTN_API specattn_status specattn_use_isa(const char* name);

/* q, k_new, v_new [B, T, H, D]; tree_mask int64 [B or 1, T, ceil(S / 64)], bit j of word w: key
 * 64 w + j is seen; null: a causal chain. lse is the natural logarithm. */
SPECATTN_API specattn_status specattn_tree_attention(
    const DLTensor* q, const DLTensor* k_new, const DLTensor* v_new, const DLTensor* tree_mask,
    double softmax_scale, double softcap, const DLTensor* out, const DLTensor* lse, int threads);

/* Caches [B, N, Hk, D], or paged [pages, page_size, Hk, D] with a block_table; a tree that lies in
 * the cache already has null k_tree. depths: int32 rows of the tree, needed with a window and a
 * mask. window, max_seqlen_q: 0 for none. */
SPECATTN_API specattn_status specattn_hybrid_tree_attention(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache,
    const DLTensor* cache_seqlens, const DLTensor* k_tree, const DLTensor* v_tree,
    const DLTensor* tree_mask, const DLTensor* depths, const DLTensor* block_table, int64_t window,
    double softmax_scale, double softcap, const DLTensor* sinks, const DLTensor* cu_seqlens_q,
    int64_t max_seqlen_q, const DLTensor* k_scale, const DLTensor* v_scale, const DLTensor* out,
    const DLTensor* lse, int threads);

/* The same; and what the rows `collect_rows` gave the cached tokens: collect is "scores" or
 * "logits". */
SPECATTN_API specattn_status specattn_verify_attention(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache,
    const DLTensor* cache_seqlens, const DLTensor* k_tree, const DLTensor* v_tree,
    const DLTensor* tree_mask, const DLTensor* depths, const DLTensor* block_table, int64_t window,
    double softmax_scale, double softcap, const DLTensor* sinks, const DLTensor* cu_seqlens_q,
    int64_t max_seqlen_q, const DLTensor* k_scale, const DLTensor* v_scale, const char* collect,
    const int64_t* collect_rows, int64_t num_rows, int per_head, const DLTensor* out,
    const DLTensor* lse, const DLTensor* collected, int threads);

SPECATTN_API specattn_status specattn_sparse_gather_attention(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache, const DLTensor* indices,
    const DLTensor* index_lengths, const DLTensor* k_new, const DLTensor* v_new,
    const DLTensor* tree_mask, const DLTensor* block_table, double softmax_scale, double softcap,
    const DLTensor* sinks, const DLTensor* cache_seqlens, const DLTensor* cu_seqlens_q,
    int64_t max_seqlen_q, const DLTensor* k_scale, const DLTensor* v_scale, int per_row,
    const DLTensor* out, const DLTensor* lse, int threads);

SPECATTN_API specattn_status specattn_importance_scores(const DLTensor* q, const DLTensor* k_cache,
                                                        const DLTensor* cache_seqlens, int per_head,
                                                        const DLTensor* block_table,
                                                        double softmax_scale,
                                                        const DLTensor* k_scale,
                                                        const DLTensor* scores, int threads);

/* Of each list the budget best, or the share `ratio`: one of both, the other negative. */
SPECATTN_API specattn_status specattn_select_topk(const DLTensor* scores,
                                                  const DLTensor* cache_seqlens, double ratio,
                                                  int64_t budget, int64_t min_tokens,
                                                  int64_t keep_first, int64_t keep_last,
                                                  const DLTensor* indices,
                                                  const DLTensor* index_lengths, int threads);

SPECATTN_API specattn_status specattn_merge_state(const DLTensor* out_a, const DLTensor* lse_a,
                                                  const DLTensor* out_b, const DLTensor* lse_b,
                                                  const DLTensor* out, const DLTensor* lse,
                                                  int threads);

SPECATTN_API specattn_status specattn_merge_states(const DLTensor* outs, const DLTensor* lses,
                                                   const DLTensor* out, const DLTensor* lse,
                                                   int threads);

/* New keys and values into the slots of a paged cache; new scales are chosen where they are given.
 */
SPECATTN_API specattn_status specattn_write_kv(const DLTensor* k, const DLTensor* v,
                                               const DLTensor* k_cache, const DLTensor* v_cache,
                                               const DLTensor* slots, const DLTensor* k_scale,
                                               const DLTensor* v_scale, const DLTensor* new_k_scale,
                                               const DLTensor* new_v_scale, int threads);

/* activation: null, "silu", "gelu", "gelu_tanh" or "sigmoid". */
SPECATTN_API specattn_status specattn_linear_few_rows(
    const DLTensor* x, const DLTensor* weight, const DLTensor* bias, const DLTensor* up,
    const char* activation, const DLTensor* residual, const DLTensor* scale, const DLTensor* zero,
    const DLTensor* up_scale, const DLTensor* up_zero, const DLTensor* out, int threads);

SPECATTN_API specattn_status specattn_add_gumbel_noise(const DLTensor* logits, int64_t seed,
                                                       const DLTensor* requests,
                                                       const DLTensor* positions,
                                                       const DLTensor* out, int threads);

SPECATTN_API specattn_status specattn_gated_delta_tree(const DLTensor* q, const DLTensor* k,
                                                       const DLTensor* v, const DLTensor* g,
                                                       const DLTensor* beta, const DLTensor* state,
                                                       const DLTensor* parents, double query_scale,
                                                       int l2_norm, const DLTensor* cu_seqlens_q,
                                                       int64_t max_seqlen_q, const DLTensor* out,
                                                       const DLTensor* stash, int threads);

SPECATTN_API specattn_status specattn_gated_delta_commit(
    const DLTensor* state, const DLTensor* stash, const DLTensor* nodes, const DLTensor* counts,
    const DLTensor* cu_seqlens_q, int64_t max_seqlen_q, int threads);

SPECATTN_API specattn_status specattn_causal_conv_tree(
    const DLTensor* x, const DLTensor* weight, const DLTensor* bias, const DLTensor* conv_state,
    const DLTensor* parents, const char* activation, const DLTensor* cu_seqlens_q,
    int64_t max_seqlen_q, const DLTensor* out, int threads);

SPECATTN_API specattn_status specattn_causal_conv_commit(const DLTensor* conv_state,
                                                         const DLTensor* x, const DLTensor* nodes,
                                                         const DLTensor* counts,
                                                         const DLTensor* cu_seqlens_q,
                                                         int64_t max_seqlen_q, int threads);

#ifdef __cplusplus
}
#endif
#endif /* SPECATTN_H_ */
