// The functions of include/specattn.h.
#include <exception>
#include <new>

#include "operators.h"

using namespace specattn;

namespace {

thread_local std::string last_error;

template <class Function>
specattn_status guarded(const Function& function) noexcept {
  specattn_status status = SPECATTN_FAILED;
  try {
    function();
    return SPECATTN_OK;
  } catch (const std::out_of_range& error) {
    status = SPECATTN_OUT_OF_RANGE, last_error = error.what();
  } catch (const std::invalid_argument& error) {
    status = SPECATTN_INVALID, last_error = error.what();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return status;
}

template <class... Given>
specattn_status call(const Operator& op, int threads, const Given&... given) noexcept {
  return guarded([&] {
    const Value values[] = {Value(given)...};
    Arguments arguments(values, sizeof...(given));
    const Made made = op.make(arguments);
    arguments.end();
    made->check();
    made->run(threads > 1 ? threads : 1);
  });
}

// What is left out as 0, or as a negative number.
Value positive(int64_t number) { return number > 0 ? Value(number) : Value(); }
template <class T>
Value not_negative(T number) {
  return number >= 0 ? Value(number) : Value();
}

}  // namespace

const char* specattn_error() { return last_error.c_str(); }

const char* specattn_isa() {
  static thread_local std::string name;
  return (name = isa()).c_str();
}

specattn_status specattn_use_isa(const char* name) {
  return guarded([&] { use_isa(name); });
}

specattn_status specattn_tree_attention(const DLTensor* q, const DLTensor* k_new,
                                        const DLTensor* v_new, const DLTensor* tree_mask,
                                        double softmax_scale, double softcap, const DLTensor* out,
                                        const DLTensor* lse, int threads) {
  static const Operator& op = operator_named("tree_attention");
  return call(op, threads, q, k_new, v_new, tree_mask, softmax_scale, softcap, out, lse);
}

specattn_status specattn_hybrid_tree_attention(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache,
    const DLTensor* cache_seqlens, const DLTensor* k_tree, const DLTensor* v_tree,
    const DLTensor* tree_mask, const DLTensor* depths, const DLTensor* block_table, int64_t window,
    double softmax_scale, double softcap, const DLTensor* sinks, const DLTensor* cu_seqlens_q,
    int64_t max_seqlen_q, const DLTensor* k_scale, const DLTensor* v_scale, const DLTensor* out,
    const DLTensor* lse, int threads) {
  static const Operator& op = operator_named("hybrid_tree_attention");
  return call(op, threads, q, k_cache, v_cache, cache_seqlens, k_tree, v_tree, tree_mask, depths,
              block_table, positive(window), softmax_scale, softcap, sinks, cu_seqlens_q,
              positive(max_seqlen_q), k_scale, v_scale, out, lse);
}

specattn_status specattn_verify_attention(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache,
    const DLTensor* cache_seqlens, const DLTensor* k_tree, const DLTensor* v_tree,
    const DLTensor* tree_mask, const DLTensor* depths, const DLTensor* block_table, int64_t window,
    double softmax_scale, double softcap, const DLTensor* sinks, const DLTensor* cu_seqlens_q,
    int64_t max_seqlen_q, const DLTensor* k_scale, const DLTensor* v_scale, const char* collect,
    const int64_t* collect_rows, int64_t num_rows, int per_head, const DLTensor* out,
    const DLTensor* lse, const DLTensor* collected, int threads) {
  const std::vector<Value> rows(collect_rows, collect_rows + num_rows);
  static const Operator& op = operator_named("verify_attention");
  return call(op, threads, q, k_cache, v_cache, cache_seqlens, k_tree, v_tree, tree_mask, depths,
              block_table, positive(window), softmax_scale, softcap, sinks, cu_seqlens_q,
              positive(max_seqlen_q), k_scale, v_scale, collect, Value(rows.data(), rows.size()),
              per_head != 0, out, lse, collected);
}

specattn_status specattn_sparse_gather_attention(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache, const DLTensor* indices,
    const DLTensor* index_lengths, const DLTensor* k_new, const DLTensor* v_new,
    const DLTensor* tree_mask, const DLTensor* block_table, double softmax_scale, double softcap,
    const DLTensor* sinks, const DLTensor* cache_seqlens, const DLTensor* cu_seqlens_q,
    int64_t max_seqlen_q, const DLTensor* k_scale, const DLTensor* v_scale, int per_row,
    const DLTensor* out, const DLTensor* lse, int threads) {
  static const Operator& op = operator_named("sparse_gather_attention");
  return call(op, threads, q, k_cache, v_cache, indices, index_lengths, k_new, v_new, tree_mask,
              block_table, softmax_scale, softcap, sinks, cache_seqlens, cu_seqlens_q,
              positive(max_seqlen_q), k_scale, v_scale, per_row != 0, out, lse);
}

specattn_status specattn_importance_scores(const DLTensor* q, const DLTensor* k_cache,
                                           const DLTensor* cache_seqlens, int per_head,
                                           const DLTensor* block_table, double softmax_scale,
                                           const DLTensor* k_scale, const DLTensor* scores,
                                           int threads) {
  static const Operator& op = operator_named("importance_scores");
  return call(op, threads, q, k_cache, cache_seqlens, per_head != 0, block_table, softmax_scale,
              k_scale, scores);
}

specattn_status specattn_select_topk(const DLTensor* scores, const DLTensor* cache_seqlens,
                                     double ratio, int64_t budget, int64_t min_tokens,
                                     int64_t keep_first, int64_t keep_last, const DLTensor* indices,
                                     const DLTensor* index_lengths, int threads) {
  static const Operator& op = operator_named("select_topk");
  return call(op, threads, scores, cache_seqlens, not_negative(ratio), not_negative(budget),
              min_tokens, keep_first, keep_last, indices, index_lengths);
}

specattn_status specattn_merge_state(const DLTensor* out_a, const DLTensor* lse_a,
                                     const DLTensor* out_b, const DLTensor* lse_b,
                                     const DLTensor* out, const DLTensor* lse, int threads) {
  static const Operator& op = operator_named("merge_state");
  return call(op, threads, out_a, lse_a, out_b, lse_b, out, lse);
}

specattn_status specattn_merge_states(const DLTensor* outs, const DLTensor* lses,
                                      const DLTensor* out, const DLTensor* lse, int threads) {
  static const Operator& op = operator_named("merge_states");
  return call(op, threads, outs, lses, out, lse);
}

specattn_status specattn_write_kv(const DLTensor* k, const DLTensor* v, const DLTensor* k_cache,
                                  const DLTensor* v_cache, const DLTensor* slots,
                                  const DLTensor* k_scale, const DLTensor* v_scale,
                                  const DLTensor* new_k_scale, const DLTensor* new_v_scale,
                                  int threads) {
  static const Operator& op = operator_named("write_kv");
  return call(op, threads, k, v, k_cache, v_cache, slots, k_scale, v_scale, new_k_scale,
              new_v_scale);
}

specattn_status specattn_linear_few_rows(const DLTensor* x, const DLTensor* weight,
                                         const DLTensor* bias, const DLTensor* up,
                                         const char* activation, const DLTensor* residual,
                                         const DLTensor* scale, const DLTensor* zero,
                                         const DLTensor* up_scale, const DLTensor* up_zero,
                                         const DLTensor* out, int threads) {
  static const Operator& op = operator_named("linear_few_rows");
  return call(op, threads, x, weight, bias, up, activation, residual, scale, zero, up_scale,
              up_zero, out);
}

specattn_status specattn_add_gumbel_noise(const DLTensor* logits, int64_t seed,
                                          const DLTensor* requests, const DLTensor* positions,
                                          const DLTensor* out, int threads) {
  static const Operator& op = operator_named("add_gumbel_noise");
  return call(op, threads, logits, seed, requests, positions, out);
}

specattn_status specattn_gated_delta_tree(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                          const DLTensor* g, const DLTensor* beta,
                                          const DLTensor* state, const DLTensor* parents,
                                          double query_scale, int l2_norm,
                                          const DLTensor* cu_seqlens_q, int64_t max_seqlen_q,
                                          const DLTensor* out, const DLTensor* stash, int threads) {
  static const Operator& op = operator_named("gated_delta_tree");
  return call(op, threads, q, k, v, g, beta, state, parents, query_scale, l2_norm != 0,
              cu_seqlens_q, positive(max_seqlen_q), out, stash);
}

specattn_status specattn_gated_delta_commit(const DLTensor* state, const DLTensor* stash,
                                            const DLTensor* nodes, const DLTensor* counts,
                                            const DLTensor* cu_seqlens_q, int64_t max_seqlen_q,
                                            int threads) {
  static const Operator& op = operator_named("gated_delta_commit");
  return call(op, threads, state, stash, nodes, counts, cu_seqlens_q, positive(max_seqlen_q));
}

specattn_status specattn_causal_conv_tree(const DLTensor* x, const DLTensor* weight,
                                          const DLTensor* bias, const DLTensor* conv_state,
                                          const DLTensor* parents, const char* activation,
                                          const DLTensor* cu_seqlens_q, int64_t max_seqlen_q,
                                          const DLTensor* out, int threads) {
  static const Operator& op = operator_named("causal_conv_tree");
  return call(op, threads, x, weight, bias, conv_state, parents, activation, cu_seqlens_q,
              positive(max_seqlen_q), out);
}

specattn_status specattn_causal_conv_commit(const DLTensor* conv_state, const DLTensor* x,
                                            const DLTensor* nodes, const DLTensor* counts,
                                            const DLTensor* cu_seqlens_q, int64_t max_seqlen_q,
                                            int threads) {
  static const Operator& op = operator_named("causal_conv_commit");
  return call(op, threads, conv_state, x, nodes, counts, cu_seqlens_q, positive(max_seqlen_q));
}
