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
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "full_registers_amx.h"
#include "isa_amx.h"
#include "linear_amx.h"
#include "kernels_of.h"

namespace specattn {

const Kernels& amx_kernels() {
  static constexpr Kernels kernels = kernels_of<Amx>("amx");
  return kernels;
}

}  // namespace specattn

#endif
