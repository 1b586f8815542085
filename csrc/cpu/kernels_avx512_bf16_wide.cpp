#if defined(__x86_64__)

#include "portable.h"

#define SPECATTN_BF16
#pragma GCC target("avx512bf16,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "isa_avx512.h"
#include "attention.h"

namespace specattn {

void attend_wide(Kernels& kernels) {
  kernels.attend[static_cast<int>(Dtype::kFloat32)] = attend<Avx512Bf16Wide, float>;
  kernels.attend[static_cast<int>(Dtype::kBFloat16)] = attend<Avx512Bf16Wide, bf16>;
}

}  // namespace specattn

#endif
