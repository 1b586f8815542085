#if defined(__x86_64__)

#include "portable.h"

#pragma GCC target("avx2,fma,f16c")

#include "isa_avx2.h"
#include "kernels_of.h"

namespace specattn {

const Kernels& avx2_kernels() {
  static constexpr Kernels kernels = kernels_of<Avx2>("avx2");
  return kernels;
}

}  // namespace specattn

#endif
