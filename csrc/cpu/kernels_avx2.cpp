#if defined(__x86_64__)

// What all units share comes first, compiled for any processor: the linker may keep any one copy.
#include <algorithm>
#include <cmath>
#include <utility>

#include "convert.h"
#include "denormals.h"
#include "address.h"
#include "kernels.h"
#include "prefetch.h"

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
