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

#define SPECATTN_BF16
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "isa_avx512.h"
#include "kernels_of.h"

namespace specattn {

const Kernels& avx512_bf16_kernels() {
  static constexpr Kernels kernels = kernels_of<Avx512Bf16>("avx512_bf16");
  return kernels;
}

}  // namespace specattn

#endif
