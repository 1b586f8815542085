// Products of a few packed rows of x with rows of codes of weights, which become numbers in
// registers: exactly, since a code less its zero point has at most eight bits.
//
// The products of a group of codes are summed alone, and their sum is multiplied by the group's
// scale: so a row's bits are the same whatever rows are multiplied beside it.
#pragma once

#include "float8_codes.h"
#include "linear_finish.h"

namespace specattn {

template <class Isa, class Elem, Codes kCodes>
struct QuantisedRows {
  using V = typename Isa::V;
  using Dot = typename Isa::template Dot<Elem>;
  static constexpr bool kNibbles = kCodes == Codes::k4Bits;
  using Integers = std::conditional_t<kNibbles, typename Dot::Nibbles, typename Dot::Bytes>;
  using Block =
      std::conditional_t<kCodes == Codes::kFloat8, Float8Codes<Isa, Dot::kPair>, Integers>;
  static constexpr int W = Isa::W, kPair = Dot::kPair;
  static constexpr int kVectors = kChunkCodes / (W * kPair);  // of a chunk
  static constexpr int kChunks = kBlockCodes / kChunkCodes;   // of a block
  static constexpr int kBlockFloats = kBlockCodes / kPair;    // of a row of x
  static constexpr int kBlockBytes = kNibbles ? kBlockCodes / 2 : kBlockCodes;
  static constexpr int kTotals = Isa::kScoreAccumulators >= 16 ? 16 : 8;  // held in registers
  static constexpr int64_t kDepth = 2048;                                 // of a chain, at most

  static constexpr int rows_at_once(int64_t left) {
    int rows = 1;
    while (rows < left && rows < kTotals) rows *= 2;
    return rows;
  }

  static constexpr int64_t packed(int rows, int64_t K) {
    return rows * ceil_div(K, kBlockCodes) * kBlockFloats;
  }

  // Per block of rows [block of codes][row][code], whole blocks, in the order of the numbers.
  static void pack(const Linear& p, float* to) {
    for (int64_t first = 0; first < p.M;) {
      const int rows = rows_at_once(p.M - first);
      for (int64_t k = 0; k < p.K; k += kBlockCodes) {
        for (int r = 0; r < rows; ++r, to += kBlockFloats) {
          const Elem* from = static_cast<const Elem*>(p.x) + (first + r) * p.x_row + k;
          pack_block(from, first + r < p.M ? std::min<int64_t>(kBlockCodes, p.K - k) : 0, to);
        }
      }
      first += rows;
    }
  }

  // Writes the numbers of a row; of floats they are, so Elem is float.
  template <class Out>
  static void widen(const Dequantise& p, int64_t row, Out* out) {
    static_assert(kPair == 1);
    const char* codes = static_cast<const char*>(p.weights.data) + row * p.weights.stride;
    const int chunks = p.group < kBlockCodes ? static_cast<int>(p.group) / kChunkCodes : kChunks;
    for (int64_t start = 0; start < p.K; start += kDepth) {
      float scales[kMostGroups + W];
      uint8_t zeros[kMostGroups];
      const int64_t depth = std::min(kDepth, p.K - start);
      take_groups(p, p.weights, row, start, depth, scales, zeros);
      for (int64_t k = 0; k < depth; k += kBlockCodes, codes += kBlockBytes) {
        alignas(64) char copy[kBlockCodes];
        const Block found(whole_block(codes, depth - k, copy));
        for (int i = 0; i < kChunks && k + i * kChunkCodes < depth; ++i) {
          const int64_t group = (k / kChunkCodes + i) / chunks;
          V v[kVectors];
          alignas(64) float numbers[kChunkCodes], ordered[kChunkCodes];
          found.numbers(i, Block::zero(zeros + group), v);
          for (int n = 0; n < kVectors; ++n) {
            Isa::store(numbers + n * W, Isa::mul(v[n], Isa::set1(scales[group])));
          }
          for (int n = 0; n < kChunkCodes; ++n) ordered[place_of(n)] = numbers[n];
          const int64_t at = k + i * kChunkCodes;
          for (int n = 0; n < kChunkCodes && at + n < depth; n += W) {
            const int left = static_cast<int>(std::min<int64_t>(W, depth - at - n));
            store_up_to<Isa>(out + start + at + n, Isa::load(ordered + n), left);
          }
        }
      }
    }
  }

  // sums[row][column] of outputs [first, first + count) of a part; columns are padded to a whole
  // vector. `next` is what will be read afterwards, rows that lie as far apart.
  template <int rows>
  static void multiply(const float* x, const Linear& p, const Linear::Weights& w, int64_t first,
                       int count, const char* next, float (*sums)[kMostColumns]) {
    constexpr int kColumns = std::min(kTotals / rows, kWeightStreams);
    const int64_t blocks = tuning.packed_bytes / (4 * rows * kBlockFloats);
    const int64_t part = std::max<int64_t>(blocks, 1) * kBlockCodes;
    alignas(64) float partial[rows][kMostColumns][W];
    const int each = static_cast<int>(ceil_div(count, kColumns));
    const char* const codes = static_cast<const char*>(w.data) + first * w.stride;
    const auto add = p.group == 32   ? add_chain<rows, kColumns, 1>
                     : p.group == 64 ? add_chain<rows, kColumns, 2>
                                     : add_chain<rows, kColumns, 4>;
    Streams<kColumns> streams;
    Place now{each, p.K, part, kDepth}, ahead = now;
    for (int64_t bytes = 0; bytes < tuning.stream_ahead && !ahead.over; ahead.advance()) {
      bytes += code_bytes(kCodes, ahead.depth());
    }
    for (; !now.over; now.advance(), ahead.advance()) {
      const int64_t depth = now.depth();
      for (int c = 0; c < kColumns; ++c) {
        const int column = c * each + now.row, row = std::min(column, count - 1);
        streams.codes[c] = codes + row * w.stride + code_bytes(kCodes, now.k);
        streams.ahead[c] = (ahead.over ? next : codes) + (c * each + ahead.row) * w.stride +
                           code_bytes(kCodes, ahead.k);
        streams.to[c] = partial[0][column];
        take_groups(p, w, first + row, now.k, depth, streams.scales[c], streams.zeros[c]);
      }
      add(x + now.k / kBlockCodes * rows * kBlockFloats, streams, depth, now.k > 0);
    }
    sum_lanes<Isa, rows>(partial, count, sums);
  }

 private:
  static constexpr int64_t kMostGroups = kDepth / kChunkCodes;

  template <int columns>
  struct Streams {
    const char *codes[columns], *ahead[columns];
    float* to[columns];
    float scales[columns][kMostGroups + W];
    uint8_t zeros[columns][kMostGroups];
  };

  // A block of codes, or a copy of the `left` ones that a row ends with, where those lie alone.
  static const char* whole_block(const char* codes, int64_t left, char* copy) {
    if (kNibbles || left >= kBlockCodes) return codes;
    std::memset(copy, 0, kBlockCodes);
    std::memcpy(copy, codes, static_cast<size_t>(left));
    return copy;
  }

  static void pack_block(const Elem* from, int64_t count, float* to) {
    Elem block[kBlockCodes] = {};
    std::copy(from, from + count, block);
    if constexpr (kPair == 2) {
      std::memcpy(to, block, sizeof block);
    } else {
      for (int k = 0; k < kBlockCodes; ++k) to[k] = to_float(block[place_of(k)]);
    }
  }

  // Where the number lies in its chunk that is number `place` of those that codes become.
  static constexpr int place_of(int place) {
    const int piece = place / (2 * W) * (2 * W), in = place % (2 * W);
    return kPair == 1 && kNibbles ? piece + in % W * 2 + in / W : place;
  }

  // The scales and zeros of groups of up to a block, from code k of a row on; behind the row's end
  // they are 0, for whole blocks. Problem: Linear, or Dequantise.
  template <class Problem>
  static void take_groups(const Problem& p, const Linear::Weights& w, int64_t row, int64_t k,
                          int64_t depth, float* scales, uint8_t* zeros) {
    const int64_t group = std::min<int64_t>(p.group, kBlockCodes);
    const int64_t count = ceil_div(depth, group), whole = round_up(depth, kBlockCodes) / group;
    std::fill(scales + count, scales + whole, 0.0f);
    std::fill(zeros + count, zeros + whole, uint8_t{0});
    const auto take = [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(w.scale) + row * w.scale_row;
      if (p.group > kBlockCodes) {
        for (int64_t i = 0; i < count; ++i) scales[i] = to_float(from[(k + i * group) / p.group]);
        return;
      }
      from += k / group;
      int64_t i = 0;
      for (; i + W <= count; i += W) Isa::store(scales + i, Isa::load_as_float(from + i));
      for (; i < count; ++i) scales[i] = to_float(from[i]);
    };
    if (p.scale_type == Dtype::kFloat32) take(float{});
    if (p.scale_type == Dtype::kBFloat16) take(bf16{});
    if (p.scale_type == Dtype::kFloat16) take(fp16{});
    if constexpr (kCodes == Codes::kFloat8) {  // numbers are over it
      for (int64_t i = 0; i < count; ++i) scales[i] *= Block::kUnit;
    }
    if (!w.zero) {
      std::memset(zeros, kNibbles ? 8 : 0, static_cast<size_t>(count));
      return;
    }
    const uint8_t* const from = static_cast<const uint8_t*>(w.zero) + row * w.zero_row;
    if (p.group <= kBlockCodes) {
      std::memcpy(zeros, from + k / group, static_cast<size_t>(count));
    } else {
      for (int64_t i = 0; i < count; ++i) zeros[i] = from[(k + i * group) / p.group];
    }
  }

  // Adds products over `depth` codes to partial sums, kMostColumns * W floats from row to row.
  // `each` are the chunks of a group.
  template <int rows, int columns, int each>
  static void add_chain(const float* x, const Streams<columns>& streams, int64_t depth, bool more) {
    constexpr int kRow = kMostColumns * W, kGroups = kChunks / each;
    V total[rows][columns];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) {
        total[r][c] = more ? Isa::load(streams.to[c] + r * kRow) : Isa::zero();
      }
    }
    for (int64_t k = 0; k < depth; k += kBlockCodes, x += rows * kBlockFloats) {
      const int64_t block = k / kBlockCodes;
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) {
        const char* const codes = streams.codes[c] + block * kBlockBytes;
#pragma GCC unroll 2
        for (size_t line = 0; line < kBlockBytes; line += kLine) {
          __builtin_prefetch(streams.ahead[c] + block * kBlockBytes + line, 0, 2);
        }
        alignas(64) char copy[kBlockCodes];
        const Block found(whole_block(codes, depth - k, copy));
        V v[kChunks * kVectors], scale[kGroups];
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
          const auto zero = Block::zero(&streams.zeros[c][block * kGroups + g]);
          scale[g] = Isa::set1(streams.scales[c][block * kGroups + g]);
#pragma GCC unroll 4
          for (int i = g * each; i < (g + 1) * each; ++i) {
            found.numbers(i, zero, v + i * kVectors);
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          const float* const row = x + r * kBlockFloats;
#pragma GCC unroll 4
          for (int g = 0; g < kGroups; ++g) {
            V sum = Isa::zero();
#pragma GCC unroll 32
            for (int i = g * each * kVectors; i < (g + 1) * each * kVectors; ++i) {
              sum = Dot::dot(sum, v[i], Isa::load(row + i * W));
            }
            total[r][c] = Isa::fma(sum, scale[g], total[r][c]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) Isa::store(streams.to[c] + r * kRow, total[r][c]);
    }
  }
};

template <class Isa, class Elem, Codes codes>
void pack_codes(const Linear& p, float* to) {
  QuantisedRows<Isa, Elem, codes>::pack(p, to);
}

template <class Isa, class Elem, Codes codes>
void dequantise(const Dequantise& p, int64_t row) {
  Elem* const out = static_cast<Elem*>(p.out) + row * p.out_row;
  QuantisedRows<Isa, float, codes>::widen(p, row, out);
}

template <class Isa, class Elem, Codes codes>
void multiply_codes(const Linear& p, const float* x, const LinearPiece& piece) {
  using Few = QuantisedRows<Isa, Elem, codes>;
  const auto some = [&](auto count, int64_t row) {
    constexpr int kRows = decltype(count)::value;
    finish_rows<Isa, Elem, kRows>(
        p, row, piece,
        [&](const Linear::Weights& w, const Linear::Weights& after, int64_t next,
            float (*sums)[kMostColumns]) {
          const char* const coming = static_cast<const char*>(after.data) + next * after.stride;
          Few::template multiply<kRows>(x, p, w, piece.first, piece.count, coming, sums);
        });
  };
  for (int64_t row = 0; row < p.M;) {
    const int rows = Few::rows_at_once(p.M - row);
    if (rows == 1) some(std::integral_constant<int, 1>(), row);
    if (rows == 2) some(std::integral_constant<int, 2>(), row);
    if (rows == 4) some(std::integral_constant<int, 4>(), row);
    if (rows == 8) some(std::integral_constant<int, 8>(), row);
    if constexpr (Few::kTotals == 16) {
      if (rows == 16) some(std::integral_constant<int, 16>(), row);
    }
    row += rows;
    x += Few::packed(rows, p.K);
  }
}

}  // namespace specattn
