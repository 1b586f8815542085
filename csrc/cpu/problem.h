// The problem of a call, as plain pointers and strides (in elements; the last dimension is dense).
#pragma once

#include "types.h"

namespace specattn {

// [outer, token or row, head, D]: outer is a request, or a page of a paged cache.
struct Rows {
  const void* data = nullptr;
  int64_t outer = 0, token = 0, head = 0;

  bool begin_where(const Rows& x) const {
    return data == x.data && outer == x.outer && token == x.token && head == x.head;
  }
};

// The cached tokens of all requests. Contiguous, paged and gathered differ only in the address.
struct Cache {
  Rows k, v;
  Dtype type = Dtype::kFloat32;          // of an element, which may have 8 bits
  int64_t size = 4;                      // its bytes
  const int32_t* block_table = nullptr;  // paged when given
  int64_t table_stride = 0;
  int32_t page_size = 1;
  const int32_t* indices = nullptr;  // gathered when given: the i-th token is indices[i]
  int64_t indices_batch = 0, indices_head = 0, indices_row = 0;
  const int32_t* lengths = nullptr;  // tokens of a request, [B] or [B, Hk], or of a row, [B, T]
  int64_t lengths_batch = 0, lengths_head = 0, lengths_row = 0;
  bool per_row = false;             // each row has a list of its own
  const int32_t* prefix = nullptr;  // of a gathered cache: a length of -1 is all these tokens, [B]
  int64_t prefix_batch = 0;

  // The scales of 8 bits, float32: rows of one element, in the places of the tokens.
  Rows k_scale, v_scale;
  bool scaled() const { return k_scale.data != nullptr; }

  int64_t listed(int64_t b, int64_t head) const {
    return lengths[b * lengths_batch + head * lengths_head];
  }
  int64_t length(int64_t b, int64_t head) const {
    const int64_t count = listed(b, head);
    return count < 0 ? prefix[b * prefix_batch] : count;
  }
};

// The keys of the tree, and which row sees which.
struct Tree {
  Rows k, v;                      // unused when the tree lies in the cache
  bool in_cache = false;          // keys at [length, length + size) of the cache
  int64_t size = 0;               // S; 0: no tree
  const int64_t* mask = nullptr;  // packed, bit j of word w is key 64 w + j; null: causal chain
  int64_t mask_batch = 0, mask_row = 0;
  const int32_t* depths = nullptr;  // of the rows; null: from the mask, or a chain
  int64_t depths_batch = 0;
};

enum class Collect { kNone, kScores, kLogits };

struct Attention {
  Dtype dtype = Dtype::kFloat32;
  int64_t B = 0, T = 0, Hq = 0, Hk = 0, D = 0, Dv = 0;  // Dv: of values
  // Ragged where given, [B + 1]: request b has the rows from q_starts[b] on, up to T of them. Rows
  // then have no stride of a batch; what is said of [B, T] is [tokens].
  const int32_t* q_starts = nullptr;
  Rows q;
  Cache cache;
  Tree tree;
  int64_t window = 0;  // 0: none
  float scale = 1, softcap = 0;
  const float* sinks = nullptr;

  void* out = nullptr;  // [B, T, Hq, Dv]
  int64_t out_batch = 0, out_row = 0, out_head = 0;
  float* lse = nullptr;  // [B, T, Hq]
  int64_t lse_batch = 0, lse_row = 0, lse_head = 0;

  Collect collect = Collect::kNone;
  const int64_t* collect_rows = nullptr;  // rows in [0, T); of ragged ones in [-T, T)
  int64_t num_collect = 0, capacity = 0;
  bool per_head = true;       // else the scores of all heads are averaged
  void* collected = nullptr;  // scores [B, Hk, N] or [B, N] float32, logits [B, R, Hq, N] bf16
  int64_t collected_batch = 0, collected_row = 0, collected_head = 0;

  int64_t group() const { return Hq / Hk; }
  int64_t length(int64_t b, int64_t head) const { return cache.length(b, head); }
  int64_t rows(int64_t b) const { return q_starts ? q_starts[b + 1] - q_starts[b] : T; }
};

// Mean of scaled logits over all rows and the heads of a group (or all heads).
struct Importance {
  Dtype dtype = Dtype::kFloat32;
  int64_t B = 0, T = 0, Hq = 0, Hk = 0, D = 0;
  Rows q;
  Cache cache;
  float scale = 1;
  bool per_head = true;
  int64_t capacity = 0;
  float* scores = nullptr;  // [B, Hk, N] or [B, N]
  int64_t scores_batch = 0, scores_head = 0;
};

struct Merge {
  Dtype dtype = Dtype::kFloat32;
  int64_t states = 0, B = 0, T = 0, H = 0, D = 0;
  Rows outs[2];               // two states that lie apart, or
  const float* lses[2] = {};  //
  int64_t out_state = 0;      // any number, this far from each other in outs[0], lses[0]
  int64_t lse_state = 0;
  int64_t lse_strides[2][3] = {};  // batch, row, head
  void* out = nullptr;
  int64_t out_batch = 0, out_row = 0, out_head = 0;
  float* lse = nullptr;
  int64_t lse_batch = 0, lse_row = 0, lse_head = 0;
};

// New keys and values, and the places of a cache that they belong to.
struct WriteKV {
  Dtype dtype = Dtype::kFloat32, cache_dtype = Dtype::kFloat32;
  int64_t B = 0, T = 0, Hk = 0, D = 0, Dv = 0;
  Rows k, v;              // [B, T, Hk, D]; v may be missing, and has Dv
  Rows k_cache, v_cache;  // [pages, page_size, Hk, D]
  int64_t pages = 0, page_size = 1;
  Rows k_scale, v_scale;  // of 8 bits, float32: rows of one element, in the places of the tokens
  bool dynamic = false;   // they are chosen, and written
  // Whether the heads of a token lie one after the other, everywhere.
  bool k_dense = false, v_dense = false;
  const int64_t* slots64 = nullptr;  // page * page_size + offset, [B, T], negative to skip; or
  const int32_t* slots32 = nullptr;  // the same
  int64_t slots_batch = 0;

  int64_t slot(int64_t b, int64_t t) const {
    const int64_t i = b * slots_batch + t;
    return slots64 ? slots64[i] : slots32[i];
  }
};

// Rows of an embedding.
struct Embed {
  Dtype dtype = Dtype::kFloat32;
  int64_t B = 0, T = 0, H = 0, vocabulary = 0;
  const int64_t* tokens = nullptr;  // [B, T]
  int64_t tokens_batch = 0;
  const void* weight = nullptr;  // [vocabulary, H]
  int64_t weight_row = 0;
  void* out = nullptr;  // [B * T, H]
  int64_t out_row = 0;

  int64_t token(int64_t i) const { return tokens[i / T * tokens_batch + i % T]; }
};

// Every row over the root of its mean square, times a weight.
struct RmsNorm {
  Dtype dtype = Dtype::kFloat32;
  int64_t M = 0, H = 0;
  const void* x = nullptr;
  int64_t x_row = 0;
  const void* weight = nullptr;  // [H]
  float eps = 0;
  void* out = nullptr;
  int64_t out_row = 0;
};

// What happens to a layer's heads between their projection and attention: queries and keys are
// normed and rotated in place, keys and values also go to the cache.
struct RotateHeads {
  Dtype dtype = Dtype::kFloat32;
  int64_t B = 0, T = 0, Hq = 0, Hk = 0, D = 0;
  void* heads = nullptr;  // [B, T, Hq + 2 Hk, D]: queries, keys, values
  int64_t batch = 0, row = 0, head = 0;
  const void *q_norm = nullptr, *k_norm = nullptr;  // [D]; null: not normed
  float eps = 0;
  const float *cos = nullptr, *sin = nullptr;  // [positions, half]: the first 2 half of D turn
  int64_t positions = 0, half = 0, table_row = 0;
  const int32_t* prefix = nullptr;  // [B]: where the first row is stored, and the root's position
  const int32_t* depths = nullptr;  // of the rows, [B or 1, T]; null: a chain
  int64_t depths_batch = 0;
  Rows k_cache, v_cache;                  // [B, capacity, Hk, D]; null: they stay where they are
  Dtype cache_dtype = Dtype::kFloat32;    // that of the heads, or of 8 bits
  Rows k_scale, v_scale;                  // of those, written: [B, capacity, Hk]
  int64_t capacity = 0, first_slot = -1;  // first_slot: where the first row goes, instead of prefix

  int64_t depth(int64_t b, int64_t t) const { return depths ? depths[b * depths_batch + t] : t; }
  int64_t slot(int64_t b, int64_t t) const { return (first_slot < 0 ? prefix[b] : first_slot) + t; }
};

// The `width` most probable continuations of the nodes of a tree's last level. A node's score is
// the log-probability of its path; of a request's own nodes all lie one after the other.
struct BestChildren {
  Dtype dtype = Dtype::kFloat32;
  int64_t B = 0, nodes = 0, vocabulary = 0, width = 0, words = 0;
  int64_t first = 0;  // number of the level's first node in the tree; children follow the level
  const void* logits = nullptr;  // [B, nodes, vocabulary]
  int64_t logits_batch = 0, logits_row = 0;
  const float* scores = nullptr;  // [B, nodes]
  int64_t scores_batch = 0;
  const int64_t* masks = nullptr;  // [B, nodes, words]: which nodes each of these sees
  int64_t masks_batch = 0;
  float* best_scores = nullptr;  // [B, width], descending
  int64_t *best_tokens = nullptr, *best_parents = nullptr;
  int64_t best_batch = 0;
  int64_t* best_masks = nullptr;  // [B, width, words]
  int64_t best_masks_batch = 0;
};

// Logits plus noise that (seed, request, position, token) decide.
struct GumbelNoise {
  Dtype dtype = Dtype::kFloat32;
  int64_t n = 0, vocabulary = 0;
  const void* logits = nullptr;  // [n, vocabulary]
  int64_t logits_row = 0;
  uint64_t seed = 0;
  const int64_t *requests = nullptr, *positions = nullptr;  // [n]
  float* out = nullptr;                                     // [n, vocabulary]
  int64_t out_row = 0;
};

}  // namespace specattn
