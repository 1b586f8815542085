// Weights of 8 and 4 bits: how codes lie in memory, and the numbers of those of 4 bits.
//
// A row of 4-bit codes is made of blocks of 128 in 64 bytes, 32 words of 16 bits: word j holds
// codes j, 32 + j, 64 + j and 96 + j, from its lowest bits on. So a shift of all words leaves
// neighbours side by side. The last block is whole, whatever it holds behind the row's end.
//
// Or codes lie in tiles of sixteen rows, which are outputs, [words of a row][row]: a vector of
// words has a lane for each output. A word of 32 bits holds four codes of 8 bits, from its lowest
// byte on, or eight of 4: the even ones in its lower half, the odd ones in its upper half, so that
// a shift leaves neighbours side by side. Scales and zero points then lie in tiles [group][row].
#pragma once

#include "types.h"

namespace specattn {

// kNone: weights are numbers of the type of x; kFloat8: codes are e4m3, without zero points.
enum class Codes { kNone, k8Bits, k4Bits, kFloat8 };

constexpr int kBlockCodes = 128, kChunkCodes = 32, kNibbleBits = 4, kMostNibble = 15;

// Where a kernel for codes stands among those of its type.
constexpr int kernel_of(Codes codes) { return static_cast<int>(codes) - 1; }

// Bytes of a row of codes.
constexpr int64_t code_bytes(Codes codes, int64_t count) {
  return codes == Codes::k4Bits ? round_up(count, kBlockCodes) / 2 : count;
}

constexpr int kTileOutputs = 16;
constexpr int kMiddle = 8;  // what codes of 4 bits are less without zero points
constexpr int nibble_shift(int code) { return kNibbleBits * (code / 2) + code % 2 * 16; }
constexpr int byte_shift(int code) { return 24 - 8 * code; }  // to the top of a word
constexpr int codes_in_word(Codes codes) { return codes == Codes::k8Bits ? 4 : 8; }

inline int nibble(const void* p) { return *static_cast<const uint8_t*>(p) & kMostNibble; }

// -15 .. 15 as floats, and their upper halves: from 15 - z on, the numbers of codes less zero z.
inline constexpr float kNibbleFloats[] = {-15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5,
                                          -4,  -3,  -2,  -1,  0,   1,   2,  3,  4,  5,  6,
                                          7,   8,   9,   10,  11,  12,  13, 14, 15};
inline constexpr uint16_t kNibbleHalves[] = {
    0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0,
    0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0,
    0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0};

}  // namespace specattn
