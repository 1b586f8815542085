// The kernels of a code path, and how a call is cut into tasks.
#pragma once

#include <type_traits>

#include "linear.h"
#include "problem.h"
#include "recurrent.h"
#include "tuning.h"
#include "visibility.h"
#include "workspace.h"

namespace specattn {

constexpr int kGroupRows = 512;      // most query rows of a head in a task: their state fits in L2
constexpr int kMostColumns = 48;     // outputs of a piece of a linear layer, per part
constexpr int kMostRowsAtOnce = 16;  // rows of x that are multiplied in registers or tiles
constexpr int kPanelRows = 8;        // rows of x that meet a panel in registers
constexpr int64_t kNoiseGroup = 1024;       // tokens whose noise is made in one go
constexpr int64_t kImportanceChunk = 1024;  // most keys that are scored in one go

struct Plan {
  int64_t rows = 0;        // packed rows of a head and task, padded
  int64_t stride = 0;      // D, padded
  int64_t v_stride = 0;    // Dv, padded
  int64_t row_groups = 1;  // ranges of query rows
  int64_t rows_per_group = 1;
  int64_t heads_per_task = 1;
  int64_t splits = 1;  // ranges of key blocks
  bool adds = false;   // several tasks add to the same scores
};

struct Task {
  int64_t b = 0, head = 0, heads = 1;
  RowRange rows;
  int64_t first_block = 0, last_block = 0;
  int64_t ahead_block = 0;  // the same thread goes on up to here: worth looking ahead
};

struct Kernels {
  const char* name;
  // All indexed by Dtype: of queries, or of the cache.
  void (*attend[3])(const Attention&, const Plan&, const Task&, float* states, Scratch);
  void (*finish[3])(const Attention&, const Plan&, const Task&, const float* states,
                    int64_t split_stride);
  void (*mean_query[3])(const Importance&, int64_t b, int64_t head, float* mean);
  void (*importance[6])(const Importance&, int64_t b, int64_t first, int64_t last,
                        const float* means);
  void (*merge[3])(const Merge&, int64_t first, int64_t last);
  void (*best_children[3])(const BestChildren&, int64_t b);
  void (*add_gumbel_noise[3])(const GumbelNoise&, int64_t row, int64_t first);
  void (*rms_norm[3])(const RmsNorm&, int64_t row);
  void (*rotate_heads[3])(const RotateHeads&, int64_t b, int64_t t);
  void (*pack_linear[3])(const Linear&, float* x);
  void (*linear[3])(const Linear&, const float* x, const LinearPiece&);
  // The same by weights of codes: of 8 bits, of 4, floats of 8.
  void (*pack_codes[3][3])(const Linear&, float* x);
  void (*linear_codes[3][3])(const Linear&, const float* x, const LinearPiece&);
  void (*dequantise[3][3])(const Dequantise&, int64_t row);
  // The same of tiles of codes, of 8 bits and of 4; a tile at a time.
  void (*pack_tiles[2][3])(const Linear&, float* x);
  void (*linear_tiles[2][3])(const Linear&, const float* x, const LinearPiece&);
  void (*dequantise_tile[2][3])(const Dequantise&, int64_t tile);
  void (*gate[3])(const Gate&, int64_t row);
  // A head of all requests' heads; memory of `next` is fetched, which is negative for none.
  void (*gated_delta[3])(const GatedDelta&, int64_t head, int64_t next, float* scratch);
  void (*gated_delta_commit)(const GatedDeltaCommit&, int64_t head, int64_t next, float* scratch);
  void (*causal_conv[3])(const CausalConv&, int64_t b, int64_t first, int64_t last);
  int64_t (*multiply_registers[3])(int64_t rounds);  // returns the operations
};

const Kernels& chosen_kernels();  // best that this processor has, unless another is forced
const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
// What follows has a kernel, or none where AVX-512's computes the same by the same instructions.
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
const Kernels& amx_fp16_kernels();
// By AVX512-BF16, where Tuning::wide says so: the same bits.
struct WideAttend {
  std::remove_extent_t<decltype(Kernels::attend)> of_float32, of_bfloat16;
};
const WideAttend& wide_attend();

// A piece of bfloat16 products of many rows. The thread needs `memory` for panels and sums.
void multiply_panel_avx512_bf16(const Linear&, float* memory, const LinearPiece&);
#endif

}  // namespace specattn
