#if defined(__x86_64__)

#include "portable.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "isa_avx512.h"
#include "kernels_of.h"

namespace specattn {

const Kernels& avx512_kernels() {
  static constexpr Kernels kernels = kernels_of<Avx512>("avx512");
  return kernels;
}

}  // namespace specattn

#endif
