#include "linear.h"

#include <algorithm>
#include <string_view>

#include "kernels.h"
#include "run.h"
#include "team.h"

namespace specattn {
namespace {

constexpr int64_t kFewestColumns = 12;  // of a piece: as few as give every stream whole rows

// The outputs of a call in pieces that threads take one after the other.
class Pieces {
 public:
  Pieces(const Linear& p, int threads) : p_(p), threads_(threads) {
    const int64_t fewest = p.tiles ? kTileOutputs : kFewestColumns;
    while (columns_ > fewest && count() < tuning.linear_pieces * threads) {
      columns_ = p.tiles ? columns_ - kTileOutputs : columns_ / 2;
    }
  }

  int64_t count() const {
    int64_t sum = 0;
    for (int i = 0; i < parts(); ++i) sum += of(i);
    return sum;
  }

  LinearPiece operator[](int64_t index) const {
    LinearPiece piece;
    int64_t before = 0;
    while (index >= of(piece.part)) {
      index -= of(piece.part);
      before += p_.parts[piece.part++].rows;
    }
    piece.first = index * columns_;
    piece.count = static_cast<int>(std::min(columns_, p_.parts[piece.part].rows - piece.first));
    piece.column = before + piece.first;
    piece.next = piece.first + threads_ * columns_;
    if (piece.next >= p_.parts[piece.part].rows) piece.next = piece.first;
    return piece;
  }

 private:
  int parts() const { return p_.gated ? 1 : p_.num_parts; }
  int64_t of(int part) const { return ceil_div(p_.parts[part].rows, columns_); }

  const Linear& p_;
  const int threads_;
  int64_t columns_ = kMostColumns;
};

// Floats of a thread that multiplies many rows: panels, and sums where K takes several.
int64_t panel_floats(const Linear& p) {
  const int64_t rows = p.K > tuning.panel_depth ? round_up(p.M, kPanelRows) : kPanelRows;
  return (p.gated ? 2 : 1) * kMostColumns * (std::min(tuning.panel_depth, p.K) / 2 + rows);
}

}  // namespace

void run(const Linear& p, int threads) {
  static thread_local Arena arena;
  const Kernels& kernels = chosen_kernels();
  const int type = static_cast<int>(p.dtype);
  const bool coded = p.codes != Codes::kNone;
  const int64_t size = coded ? 1 : p.dtype == Dtype::kFloat32 ? 4 : 2;
  const int codes = coded ? kernel_of(p.codes) : 0;
  const auto pack = p.tiles ? kernels.pack_tiles[codes][type]
                    : coded ? kernels.pack_codes[codes][type]
                            : kernels.pack_linear[type];
  const auto multiply = p.tiles ? kernels.linear_tiles[codes][type]
                        : coded ? kernels.linear_codes[codes][type]
                                : kernels.linear[type];
  const Pieces pieces(p, threads);
  const int64_t count = pieces.count();
  const int64_t work = p.columns() * (p.gated ? 2 : 1) * p.K * (size + p.M);
  threads = useful_threads(work, count, threads);
  float* const x = arena.floats(round_up(p.M, kMostRowsAtOnce) * round_up(p.K, kBlockCodes));
  pack(p, x);
  parallel(threads, count, [&](int64_t i, int) { multiply(p, x, pieces[i]); });
}

bool multiplies_many_rows([[maybe_unused]] Dtype dtype) {
#if defined(__x86_64__)
  return dtype == Dtype::kBFloat16 && std::string_view(chosen_kernels().name) == "avx512_bf16";
#else
  return false;
#endif
}

void run([[maybe_unused]] const LinearManyRows& p, [[maybe_unused]] int threads) {
#if defined(__x86_64__)
  static thread_local Arena arena;
  const Pieces pieces(p, threads);
  const int64_t count = pieces.count(), own = round_up(panel_floats(p), 16);
  threads = useful_threads(p.columns() * (p.gated ? 2 : 1) * p.K * p.M, count, threads);
  float* const memory = arena.floats(threads * own);
  parallel(threads, count, [&](int64_t i, int worker) {
    multiply_panel_avx512_bf16(p, memory + worker * own, pieces[i]);
  });
#endif
}

}  // namespace specattn
