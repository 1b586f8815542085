// Products of a few packed rows of x with tiles of codes of weights (codes.h): lanes are outputs,
// and a number of x meets all of them.
//
// The products of a group of codes are summed alone, in the order of K, and their sum is multiplied
// by the group's scale: so a row's bits are the same whatever rows are multiplied beside it. For a
// group of 64 that is one product in 33.
#pragma once

#include "linear_finish.h"
#include "tile.h"

namespace specattn {

template <class Isa, class Elem, Codes kCodes>
struct TiledRows {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  static constexpr bool kNibbles = kCodes == Codes::k4Bits;
  template <bool zeros>
  using Words = std::conditional_t<kNibbles, typename Dot::template NibbleWords<zeros>,
                                   typename Dot::template ByteWords<zeros>>;
  static constexpr int W = Isa::W, kPair = Dot::kPair, kVectors = kTileOutputs / W;  // of a tile
  static constexpr int kWordCodes = codes_in_word(kCodes), kUnits = kWordCodes / kPair;
  static constexpr bool kWide = Isa::kScoreAccumulators >= 16;
  static constexpr int kMost = kWide ? 16 : 8, kSums = kWide ? 24 : 8;  // rows, and registers

  // Codes that all outputs of a piece are multiplied with, while x stays in the L1 cache.
  static int64_t depth_of(int rows) { return 2 * tuning.packed_bytes / 4 * kPair / rows; }

  static constexpr int rows_at_once(int64_t left) {
    int rows = 1;
    while (rows < left && rows < kMost) rows *= 2;
    return rows;
  }

  static constexpr int64_t packed(int rows, int64_t K) { return rows * K / kPair; }

  // Per block of rows [unit along K][row].
  static void pack(const Linear& p, float* to) {
    const int64_t units = p.K / kPair;
    for (int64_t first = 0; first < p.M;) {
      const int rows = rows_at_once(p.M - first);
      for (int r = 0; r < rows; ++r) {
        const Elem* const from = static_cast<const Elem*>(p.x) + (first + r) * p.x_row;
        for (int64_t u = 0; u < units; ++u) {
          float& at = to[u * rows + r];
          if (first + r >= p.M) {
            at = 0;
          } else if constexpr (kPair == 2) {
            std::memcpy(&at, from + 2 * u, sizeof at);
          } else {
            at = to_float(from[u]);
          }
        }
      }
      first += rows;
      to += packed(rows, p.K);
    }
  }

  // sums[row][column] of outputs [first, first + count) of a part, whole tiles. `next` is the tile
  // that will be read afterwards. For one row tiles are read one after the other: memory is fastest
  // in order.
  template <int rows>
  static void multiply(const float* x, const Linear& p, const Linear::Weights& w, int64_t first,
                       int count, const char* next, float (*sums)[kMostColumns]) {
    constexpr int kAbreast = rows == 1 ? 1 : std::min(kSums / rows, 3);
    const int64_t most = depth_of(rows);
    const char* const codes = tile_of(w, first);
    const int vectors = count / W;
    const auto place = [&](const char* tile, int v) {
      return tile + v / kVectors * kTileOutputs * w.stride + v % kVectors * W * kWordBytes;
    };
    for (int r = 0; r < rows; ++r) std::fill(sums[r], sums[r] + count, 0.0f);
    for (int64_t k = 0; k < p.K; k += most) {
      const int64_t before = k / kWordCodes * kWordsBytes;
      const auto add = [&](int v, auto abreast) {
        constexpr int kVs = decltype(abreast)::value;
        Streams<kVs> streams;
        for (int i = 0; i < kVs; ++i) {
          const int64_t output = first + (v + i) * W, in = output % kTileOutputs;
          streams.codes[i] = place(codes, v + i) + before;
          streams.lanes[i] = (output - in) * groups_of(p) + in;
          const bool ends = kVs == 1 && most >= p.K;  // where the piece does
          streams.left[i] = (ends ? count - v * W : kTileOutputs) * w.stride - before;
          streams.next[i] = place(next, ends ? 0 : v + i) - streams.left[i];
        }
        const auto chain = w.zero ? add_chain<rows, kVs, true> : add_chain<rows, kVs, false>;
        chain(x + k / kPair * rows, p, w, streams, k, std::min(most, p.K - k), sums[0] + v * W);
      };
      int v = 0;
      for (; v + kAbreast <= vectors; v += kAbreast) add(v, Width<kAbreast>());
      for (; v < vectors; ++v) add(v, Width<1>());
    }
  }

  static const char* tile_of(const Linear::Weights& w, int64_t output) {
    return static_cast<const char*>(w.data) + output * w.stride;
  }

  // Writes the numbers of a tile's outputs; of floats they are, so Elem is float.
  template <class Out>
  static void widen(const Dequantise& p, int64_t tile, Out* out, int64_t out_row) {
    static_assert(kPair == 1);
    p.weights.zero ? widen_tile<true>(p, tile, out, out_row)
                   : widen_tile<false>(p, tile, out, out_row);
  }

 private:
  static constexpr int kWordBytes = 4, kWordsBytes = kTileOutputs * kWordBytes;

  // Vectors of outputs side by side, and where what their groups have begins. `left` are the bytes
  // up to the end of what is read in one go; what lies behind is `next`.
  template <int vectors>
  struct Streams {
    const char *codes[vectors], *next[vectors];
    int64_t left[vectors], lanes[vectors];
  };

  // A group's, of the outputs in a vector.
  static V scale_of(const Linear::Weights& w, Dtype type, int64_t at) {
    if (type == Dtype::kBFloat16) {
      return Isa::load_as_float(static_cast<const bf16*>(w.scale) + at);
    }
    if (type == Dtype::kFloat16) {
      return Isa::load_as_float(static_cast<const fp16*>(w.scale) + at);
    }
    return Isa::load(static_cast<const float*>(w.scale) + at);
  }
  template <bool zeros>
  static typename Words<zeros>::Zero zero_of(const Linear::Weights& w, int64_t at) {
    return Words<zeros>::zero(zeros ? static_cast<const char*>(w.zero) + at : nullptr);
  }
  template <class Problem>
  static int64_t groups_of(const Problem& p) {
    return ceil_div(p.K, p.group);
  }
  // Where what a group has of a tile's outputs begins.
  static int64_t lanes_of(const Dequantise& p, int64_t tile, int64_t k) {
    return (tile * groups_of(p) + k / p.group) * kTileOutputs;
  }

  // Adds products over `depth` codes to sums, kMostColumns floats from row to row.
  template <int rows, int vectors, bool zeros>
  static void add_chain(const float* x, const Linear& p, const Linear::Weights& w,
                        const Streams<vectors>& streams, int64_t start, int64_t depth,
                        float* sums) {
    const int64_t each = std::min<int64_t>(p.group, kBlockCodes);  // codes whose sum is scaled
    for (int64_t k = 0; k < depth; k += each) {
      add_group<rows, vectors, zeros>(x + k / kPair * rows, p, w, streams, start + k,
                                      k / kWordCodes * kWordsBytes, std::min(each, depth - k),
                                      sums);
    }
  }

  // The same of `codes` that share a scale, from code k of a row and byte `at` of the streams on.
  template <int rows, int vectors, bool zeros>
  __attribute__((always_inline)) static void add_group(const float* x, const Linear& p,
                                                       const Linear::Weights& w,
                                                       const Streams<vectors>& streams, int64_t k,
                                                       int64_t at, int64_t codes, float* sums) {
    const int64_t bytes = codes / kWordCodes * kWordsBytes, far = at + tuning.tile_ahead;
    const char *from[vectors], *ahead[vectors];
    int64_t lanes[vectors];
    typename Words<zeros>::Zero zero[vectors];
    V acc[rows][vectors];
#pragma GCC unroll 3
    for (int c = 0; c < vectors; ++c) {
      from[c] = streams.codes[c] + at;
      ahead[c] = (far < streams.left[c] ? streams.codes[c] : streams.next[c]) + far;
      lanes[c] = streams.lanes[c] + k / p.group * kTileOutputs;
      zero[c] = zero_of<zeros>(w, lanes[c]);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) acc[r][c] = Isa::zero();
    }
    for (int64_t i = 0; i < bytes; i += kWordsBytes) {
      Words<zeros> word[vectors];
#pragma GCC unroll 3
      for (int c = 0; c < vectors; ++c) {
        __builtin_prefetch(ahead[c] + i, 0, 2);
        word[c].load(from[c] + i, zero[c]);
      }
#pragma GCC unroll 8
      for (int u = 0; u < kUnits; ++u, x += rows) {
        V v[vectors];
#pragma GCC unroll 3
        for (int c = 0; c < vectors; ++c) v[c] = word[c].unit(u, zero[c]);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          if constexpr (vectors == 1) {
            acc[r][0] = Dot::dot_at(acc[r][0], v[0], x + r);
          } else {
            const V number = Isa::broadcast(x + r);
#pragma GCC unroll 3
            for (int c = 0; c < vectors; ++c) acc[r][c] = Dot::dot(acc[r][c], v[c], number);
          }
        }
      }
    }
#pragma GCC unroll 3
    for (int c = 0; c < vectors; ++c) {
      const V scale = scale_of(w, p.scale_type, lanes[c]);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        float* const to = sums + r * kMostColumns + c * W;
        Isa::store(to, Isa::fma(acc[r][c], scale, Isa::load(to)));
      }
    }
  }

  // A vector of outputs at a time, so many codes of each; then their rows.
  template <bool zeros, class Out>
  static void widen_tile(const Dequantise& p, int64_t tile, Out* out, int64_t out_row) {
    constexpr int kOnce = std::max(kWordCodes, W);
    const Linear::Weights& w = p.weights;
    const char* const codes = tile_of(w, tile * kTileOutputs);
    int64_t done = 0;
    if constexpr (!kNibbles) done = widen_bytes<zeros>(p, tile, out, out_row);
    for (int v = 0; v < kVectors; ++v) {
      for (int64_t k = done; k < p.K; k += kOnce) {
        alignas(64) float numbers[kOnce][W];
        const int64_t lanes = lanes_of(p, tile, k) + v * W;
        const V scale = scale_of(w, p.scale_type, lanes);
        const auto zero = zero_of<zeros>(w, lanes);
        const int count = static_cast<int>(std::min<int64_t>(kOnce, p.K - k));
        for (int i = 0; i < count; i += kWordCodes) {
          const char* const at = codes + (k + i) / kWordCodes * kWordsBytes + v * W * kWordBytes;
          __builtin_prefetch(at + tuning.tile_ahead, 0, 2);
          Words<zeros> word;
          word.load(at, zero);
#pragma GCC unroll 8
          for (int u = 0; u < kWordCodes; ++u) {
            Isa::store(numbers[i + u], Isa::mul(word.unit(u, zero), scale));
          }
        }
        for (int i = 0; i < count; i += W) {
#pragma GCC unroll 4
          for (int lane = 0; lane < W; lane += 4) {
            V four[4];
            Isa::load_four_rows(numbers[i] + lane, W, four);
            Out* const to = out + (v * W + lane) * out_row + k + i;
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) store_up_to<Isa>(to + n * out_row, four[n], count - i);
          }
        }
      }
    }
  }

  // Words of bytes are put in rows before they are numbers, of which there are four times as many;
  // four rows at a time, since more are written too far apart for an L1 cache. Returns how many
  // codes of each are done.
  template <bool zeros, class Out>
  static int64_t widen_bytes(const Dequantise& p, int64_t tile, Out* out, int64_t out_row) {
    constexpr int kOnce = kWordCodes * W;
    const int64_t whole = p.K / kOnce * kOnce;
    for (int row = 0; row < kTileOutputs; row += 4) {
      for (int64_t k = 0; k < whole; k += kOnce) {
        const char* const words = tile_of(p.weights, tile * kTileOutputs) +
                                  k / kWordCodes * kWordsBytes + row * kWordBytes;
        int64_t groups[kWordCodes];
        for (int i = 0; i < kWordCodes; ++i) groups[i] = lanes_of(p, tile, k + i * W);
        for (int i = 0; row == 0 && i < W; ++i) {
          __builtin_prefetch(words + tuning.tile_ahead + i * kWordsBytes, 0, 2);
        }
        V four[4];
        Isa::load_four_rows(reinterpret_cast<const float*>(words), kTileOutputs, four);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
          alignas(64) float in_row[W];
          Isa::store(in_row, four[n]);
          widen_in_row<zeros>(p, groups, row + n, reinterpret_cast<int8_t*>(in_row),
                              out + (row + n) * out_row + k);
        }
      }
    }
    return whole;
  }

  // Writes the numbers of four vectors of codes of a row, whose groups begin there.
  template <bool zeros, class Out>
  static void widen_in_row(const Dequantise& p, const int64_t* groups, int row, const int8_t* codes,
                           Out* out) {
#pragma GCC unroll 4
    for (int i = 0; i < kWordCodes; ++i) {
      const int64_t at = groups[i] + row;
      V number = Isa::load_as_float(codes + i * W);
      if constexpr (zeros) {
        const float zero = static_cast<const int8_t*>(p.weights.zero)[at];
        number = Isa::sub(number, Isa::set1(zero));
      }
      Isa::store_as(out + i * W, Isa::mul(number, Isa::set1(one_scale(p, at))));
    }
  }
  static float one_scale(const Dequantise& p, int64_t at) {
    if (p.scale_type == Dtype::kBFloat16)
      return to_float(static_cast<const bf16*>(p.weights.scale)[at]);
    if (p.scale_type == Dtype::kFloat16)
      return to_float(static_cast<const fp16*>(p.weights.scale)[at]);
    return static_cast<const float*>(p.weights.scale)[at];
  }
};

template <class Isa, class Elem, Codes codes>
void pack_tiles(const Linear& p, float* to) {
  TiledRows<Isa, Elem, codes>::pack(p, to);
}

template <class Isa, class Elem, Codes codes>
void dequantise_tile(const Dequantise& p, int64_t tile) {
  Elem* const out = static_cast<Elem*>(p.out) + tile * kTileOutputs * p.out_row;
  TiledRows<Isa, float, codes>::widen(p, tile, out, p.out_row);
}

template <class Isa, class Elem, Codes codes>
void multiply_tiles(const Linear& p, const float* x, const LinearPiece& piece) {
  using Few = TiledRows<Isa, Elem, codes>;
  const auto some = [&](auto count, int64_t row) {
    constexpr int kRows = decltype(count)::value;
    finish_rows<Isa, Elem, kRows>(p, row, piece,
                                  [&](const Linear::Weights& w, const Linear::Weights& after,
                                      int64_t next, float (*sums)[kMostColumns]) {
                                    const char* const coming = Few::tile_of(after, next);
                                    Few::template multiply<kRows>(x, p, w, piece.first, piece.count,
                                                                  coming, sums);
                                  });
  };
  for (int64_t row = 0; row < p.M;) {
    const int rows = Few::rows_at_once(p.M - row);
    if (rows == 1) some(Width<1>(), row);
    if (rows == 2) some(Width<2>(), row);
    if (rows == 4) some(Width<4>(), row);
    if (rows == 8) some(Width<8>(), row);
    if constexpr (Few::kMost == 16) {
      if (rows == 16) some(Width<16>(), row);
    }
    row += rows;
    x += Few::packed(rows, p.K);
  }
}

}  // namespace specattn
