#if defined(__x86_64__)

#include "portable.h"

#define SPECATTN_BF16
#pragma GCC target( \
    "amx-tile,amx-bf16,avx512bf16,avx512vbmi,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#include "full_registers_amx.h"
#include "isa_amx.h"
#include "linear_amx.h"
#include "kernels_of.h"

namespace specattn {

const Kernels& amx_kernels() {
  static constexpr Kernels kernels = kernels_of<Amx>("amx");
  return kernels;
}

const Kernels& amx_fp16_kernels() {
  static constexpr Kernels kernels = [] {
    constexpr int type = static_cast<int>(Dtype::kFloat16);
    Kernels all = kernels_of<Amx>("amx_fp16");
    all.attend[type] = attend<AmxFp16, fp16>;
    all.finish[type] = finish<AmxFp16, fp16>;
    all.pack_linear[type] = pack_linear<AmxFp16, fp16>;
    all.linear[type] = multiply_piece<AmxFp16, fp16>;
    all.multiply_registers[type] = multiply_registers<AmxFp16, fp16>;
    return all;
  }();
  return kernels;
}

}  // namespace specattn

#endif
