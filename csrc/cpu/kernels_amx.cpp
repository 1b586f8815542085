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
namespace {

// Vectors of floats: beside a matrix unit, pairwise products are slower than two of them.
struct AmxFloats : Amx {
  template <class Elem>
  struct Dot : Avx512::Dot<Elem> {};
};

constexpr Kernels amx_kernels_named(const char* name) {
  constexpr int type = static_cast<int>(Dtype::kBFloat16);
  Kernels all = kernels_of<Amx>(name);
  all.pack_codes[0][type] = pack_codes<AmxFloats, bf16, Codes::k8Bits>;
  all.pack_codes[1][type] = pack_codes<AmxFloats, bf16, Codes::k4Bits>;
  all.linear_codes[0][type] = multiply_codes<AmxFloats, bf16, Codes::k8Bits>;
  all.linear_codes[1][type] = multiply_codes<AmxFloats, bf16, Codes::k4Bits>;
  return all;
}

}  // namespace

const Kernels& amx_kernels() {
  static constexpr Kernels kernels = amx_kernels_named("amx");
  return kernels;
}

const Kernels& amx_fp16_kernels() {
  static constexpr Kernels kernels = [] {
    constexpr int type = static_cast<int>(Dtype::kFloat16);
    Kernels all = amx_kernels_named("amx_fp16");
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
