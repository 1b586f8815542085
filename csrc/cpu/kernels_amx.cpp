#if defined(__x86_64__)

#include "portable.h"

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
