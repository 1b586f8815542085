#if defined(__x86_64__)

#include "portable.h"

#define SPECATTN_BF16
#pragma GCC target("avx512bf16,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "isa_avx512.h"
#include "linear_panels.h"

namespace specattn {

void multiply_panel_avx512_bf16(const Linear& p, float* memory, const LinearPiece& piece) {
  multiply_panel<Avx512Bf16, bf16>(p, memory, piece);
}

}  // namespace specattn

#endif
