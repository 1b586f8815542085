#if defined(__x86_64__)

#include "portable.h"

#define SPECATTN_BF16
#pragma GCC target("avx512bf16,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "isa_avx512.h"
#include "kernels_of.h"

namespace specattn {

const Kernels& avx512_bf16_kernels() {
  static constexpr Kernels kernels = [] {
    Kernels own = {};
    own.name = "avx512_bf16";
    set_kernels<Avx512Bf16, bf16>(own);
    return own;
  }();
  return kernels;
}

}  // namespace specattn

#endif
